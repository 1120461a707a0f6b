"""What a file of weights states besides tensors: the preparation of images, class names, and BlurPool, which has no weights.

jaxdp has metadata for all. timm stores `pretrained_cfg` as JSON in the metadata of a safetensors file, or in the `config.json`
beside it, as on the Hugging Face hub. Older files of that name hold its entries at the top.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxdp.config import BlurPool, Config, Data, Preprocessing
from jaxdp.config_words import evaluation_words
from jaxdp.errors import ConfigError, first_line
from jaxdp.files import expand_user, read_regular
from jaxdp.validation import validate

CLASSES = "classes"
METADATA, TIMM, TIMM_FILE = "preprocessing", "pretrained_cfg", "config.json"
ARCHITECTURE = re.compile(r"resnet(blur|aa)?\d+")
MAX_FILE_BYTES = 2**34  # a hundred times a ResNet-200 in float64
USUAL = Preprocessing(eval_size=224, eval_resize=0.875, eval_interpolation="bilinear")
"""The preprocessing of torchvision's first weights and most papers, for files without any."""

PixelStat = float | tuple[float, ...]


def of_file(path: str | Path, field: str = "FILE") -> Preprocessing:
    """The preprocessing in a readable safetensors file: in jaxdp's metadata, in timm's, or in timm's file beside it.

    Missing values are None or empty. Raises ConfigError, naming `field`, for values that cannot be used.
    """
    metadata = metadata_of(read_regular(path, MAX_FILE_BYTES))
    beside = Path(path).parent / TIMM_FILE
    try:
        if METADATA in metadata:
            return checked(json.loads(metadata[METADATA]))
        if TIMM in metadata:
            return _of_timm(json.loads(metadata[TIMM]))
        if beside.exists():
            document = json.loads(read_regular(beside))
            if isinstance(document, dict) and (TIMM in document or "architecture" in document):
                return _of_timm(document.get(TIMM, document))
    except (ValueError, TypeError, LookupError, AttributeError, OSError, RecursionError) as error:
        reason = f"the preprocessing that it or {TIMM_FILE} beside it states cannot be used: {first_line(error)}"
        raise ConfigError(field, str(path), reason=reason, hint="correct or remove that statement") from None
    return Preprocessing()


def classes_of(path: str | Path, field: str) -> list[str] | None:
    """The class names in a readable safetensors file, [] for numbers; None without any.

    Raises ConfigError, naming `field`, for anything but a list of names.
    """
    text = metadata_of(read_regular(Path(expand_user(path, field)), MAX_FILE_BYTES)).get(CLASSES, "null")
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = text
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        reason = f"the metadata {CLASSES!r} is not a list of names"
        raise ConfigError(field, str(path), reason=reason, hint="correct or remove it")
    return names


def metadata_of(data: bytes) -> dict[str, str]:
    """The metadata of a readable safetensors file."""
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})


def _of_timm(stated: Any) -> Preprocessing:
    """The preprocessing of a `pretrained_cfg`, whose `test_` entries replace the training entries.

    Raises ValueError for images that jaxdp does not prepare, and for an entry that is null; timm may leave `test_` entries
    empty.
    """
    if not isinstance(stated, dict):
        raise ValueError(f"{TIMM} is {json.dumps(stated)[:60]}, not an object")
    if nulls := [name for name in ("input_size", "interpolation", "crop_pct", "mean", "std") if stated.get(name, 0) is None]:
        raise ValueError(f"{nulls[0]} is null")
    if stated.get("crop_mode") not in (None, "center"):
        raise ValueError(f"crop_mode is {stated['crop_mode']!r}, not 'center'")

    def side(name: str) -> int | None:
        if (size := stated.get(name)) is None:
            return None
        if not (isinstance(size, list) and len(size) == 3 and size[0] == 3 and size[1] == size[2]):
            raise ValueError(f"{name} is {json.dumps(size)[:60]}, not [3, side, side]")
        return size[1]

    trained_at, ratio = side("input_size"), stated.get("test_crop_pct") or stated.get("crop_pct")
    if ratio and ratio > 1:
        raise ValueError(f"a crop ratio of {ratio} is above 1")
    return checked(
        {
            "eval_size": side("test_input_size") or trained_at,
            "eval_resize": ratio,
            "eval_interpolation": stated.get("interpolation"),
            "mean": stated.get("mean") or (),
            "std": stated.get("std") or (),
        }
    )


def checked(stated: dict[str, Any]) -> Preprocessing:
    """The preprocessing with these values. Raises ConfigError for invalid ones, TypeError for unknown names."""
    given = as_dict(Preprocessing(**stated))
    data = validate(Config(data=Data(source="given", **given))).data
    return Preprocessing(**{name: getattr(data, name) for name in given})


def as_dict(preprocessing: Preprocessing) -> dict[str, Any]:
    """The given values, by field."""
    return {name: value for name, value in vars(preprocessing).items() if value not in (None, ())}


def merge(first: Preprocessing, second: Preprocessing) -> Preprocessing:
    """`first` with the values that `second` gives."""
    return dataclasses.replace(first, **as_dict(second))


def with_preprocessing(data: Data, preprocessing: Preprocessing) -> Data:
    """`data` with the values that `preprocessing` gives. Its size holds for training and evaluation."""
    given = as_dict(preprocessing)
    size = given.pop("eval_size", data.image_size)
    return dataclasses.replace(data, image_size=size, **given)


def of_run(config: Config, mean: PixelStat, std: PixelStat) -> Preprocessing:
    """The preprocessing of a run's evaluation. mean, std: of its normalization; see `jaxdp.data.sources.Datasets`."""
    crops_first = config.data.eval_interpolation == "area"
    shares = [tuple(np.broadcast_to(np.asarray(stat) / 255, 3).tolist()) for stat in (mean, std)]
    return Preprocessing(
        eval_size=config.data.evaluated_size,
        eval_resize=config.data.evaluation_share if crops_first else config.data.evaluation_side,
        eval_interpolation=config.data.eval_filter,
        mean=shares[0],
        std=shares[1],
    )


def describe(preprocessing: Preprocessing) -> str:
    """The preprocessing in one line, with `USUAL` for missing values."""
    return evaluation_words(Config(data=with_preprocessing(Data(source="given"), merge(USUAL, preprocessing))))


def stated_blur_pool(path: str, metadata: Mapping[str, str]) -> str | None:
    """The form of BlurPool that a file states: in jaxdp's metadata, or by the architecture in timm's metadata or `config.json`.

    None if it states none. Raises ValueError for another filter, which jaxdp does not have.
    """
    form = _entry(metadata.get("model", ""), "blur_pool")
    if form is not None:
        if form not in get_args(BlurPool):
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
    if named and named[1]:
        raise ValueError(f"{place} names the architecture {named.string!r}, whose filter jaxdp lacks")
    return None if named is None else "none"


def _entry(document: str | bytes, name: str) -> Any:
    """An entry of a JSON object; None without, or of something else."""
    try:
        return json.loads(document).get(name)
    except (ValueError, AttributeError, RecursionError):
        return None
