"""What a file of weights states about BlurPool, a filter without weights: by names of tensors, in metadata, or beside it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from jaxdp.files import read_regular
from jaxdp.models.preprocessing import TIMM_FILE

ARCHITECTURE = re.compile(r"(?:se)?resnet(blur|aa)?\d+")
# A convolution that FFCV and Composer wrapped, with its filter; timm's filter, which files of today lack; Composer's pooling.
WRAPPED = re.compile(r"(layer\d+\.\d+\.(?:conv\d|downsample\.0))\.(?:conv\.(weight)|blur_filter)")
TIMM_FILTER, POOL_FILTER = re.compile(r"layer\d+\.\d+\.aa\.filt|maxpool\.1\.filt"), "maxpool.filt2d"

Tensor = TypeVar("Tensor")


def without_filters(stored: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str | None]:
    """(tensors under their names without BlurPool, the form of BlurPool that the names show, or None)."""
    tensors: dict[str, Tensor] = {}
    form = None
    for name, tensor in stored.items():
        wrapped = WRAPPED.fullmatch(name)
        if wrapped:
            form = "convolutions_and_pool" if POOL_FILTER in stored else "convolutions"
            if wrapped[2]:
                tensors[f"{wrapped[1]}.weight"] = tensor
        elif TIMM_FILTER.fullmatch(name):
            form = "activations"
        elif name != POOL_FILTER:
            tensors[name] = tensor
    return tensors, form


def stated_form(path: str, metadata: Mapping[str, str]) -> str | None:
    """The form of BlurPool that a file states: in jaxdp's metadata, or by the architecture in timm's `config.json` beside it.

    None if it states none. Raises ValueError for an architecture of another filter, which jaxdp does not have.
    """
    if "model" in metadata:
        return json.loads(metadata["model"]).get("blur_pool")
    beside = Path(path).parent / TIMM_FILE
    if not beside.exists():
        return None
    try:
        named = ARCHITECTURE.match(str(json.loads(read_regular(beside)).get("architecture")))
    except (ValueError, AttributeError, OSError, RecursionError):  # of something else
        return None
    if named and named[1] == "aa":
        raise ValueError(f"{TIMM_FILE} beside it names the architecture {named.string!r}, whose average pooling jaxdp lacks")
    return None if named is None else "activations" if named[1] else "none"
