"""What a file of weights states about BlurPool, a filter without weights: in its metadata, or beside it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jaxdp.config import Model
from jaxdp.files import read_regular
from jaxdp.models.preprocessing import TIMM, TIMM_FILE

FORMS = get_args(get_type_hints(Model)["blur_pool"])
ARCHITECTURE = re.compile(r"(?:se)?resnet(blur|aa)?\d+")


def stated_form(path: str, metadata: Mapping[str, str]) -> str | None:
    """The form of BlurPool that a file states: in jaxdp's metadata, or by the architecture in timm's metadata or `config.json`.

    None if it states none. Raises ValueError for another filter, which jaxdp does not have.
    """
    form = _entry(metadata.get("model", ""), "blur_pool")
    if form is not None:
        if form not in FORMS:
            raise ValueError(f"its metadata states the BlurPool {form!r}, which jaxdp lacks")
        return form
    beside = Path(path).parent / TIMM_FILE
    architecture, place = _entry(metadata.get(TIMM, ""), "architecture"), "its metadata"
    if architecture is None and beside.exists():
        try:
            architecture, place = _entry(read_regular(beside), "architecture"), f"{TIMM_FILE} beside it"
        except OSError:
            return None
    named = ARCHITECTURE.match(str(architecture))
    if named and named[1] == "aa":
        raise ValueError(f"{place} names the architecture {named.string!r}, whose average pooling jaxdp lacks")
    return None if named is None else "activations" if named[1] else "none"


def _entry(document: str | bytes, name: str) -> Any:
    """An entry of a JSON object; None without, or of something else."""
    try:
        return json.loads(document).get(name)
    except (ValueError, AttributeError, RecursionError):
        return None
