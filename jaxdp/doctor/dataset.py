"""Checks of the recipe's data set: present, readable, and with as many classes as the model."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp.choices import SOURCES
from jaxdp.config import MAX_CLASSES, Config
from jaxdp.data.datasets import stated_classes
from jaxdp.data.loader import DataError, DecodedImages
from jaxdp.data.sources import open_splits
from jaxdp.doctor.check_result import Problem, ResultBuilder
from jaxdp.errors import ConfigError, StorageError, plural
from jaxdp.relations import check_classes

HINT = "replace or remove what cannot be read, or train with --data.on-bad-image skip"
IMAGES_AT_A_TIME, LISTED = 4096, 100


def check_data(result: ResultBuilder, config: Config) -> None:
    """Open the training and the evaluation split, and decode the first image of each."""
    splits = _splits(result, config)
    for name, split in splits:
        result.ok(f"{name}: {plural(len(split), 'image', ',')}")
        loader, first = _loader(split, name, config), np.arange(1)
        try:
            loader.batch(first, first)
        except DataError as error:
            hint = "see docs/data.md" if isinstance(error.__cause__, StorageError) else "correct the data set"
            result.error(f"cannot read the first image of {name}: {error}", hint)
        for reason in loader.bad_images.values():
            result.error(f"cannot read the first image of {name}: {reason}", HINT)
    if not splits:
        return
    if warnings := [text for _, split in splits for text in getattr(split, "warnings", ())]:
        result.warning("; ".join(warnings), "see docs/data.md")
    classes = stated_classes(splits[0][1]) or config.model.classes
    try:
        check_classes(config, classes)
        if classes is not None:
            result.ok(plural(classes, "class"))
    except ConfigError as error:
        Problem.from_error(error).report(result, default_fix="")


def check_images(result: ResultBuilder, config: Config, info: Callable[[str], None]) -> None:
    """Decode every image of the training and the evaluation split with the threads of training. info: receives progress."""
    report = result.warning if config.data.on_bad_image == "skip" else result.error
    for name, split in _splits(result, config):
        total = plural(len(split), "image", ",")
        info(f"decoding {total} of {name} ...")
        loader = _loader(split, name, config)
        for start in range(0, len(split), IMAGES_AT_A_TIME):
            rows = np.arange(start, min(start + IMAGES_AT_A_TIME, len(split)))
            loader.read_ahead([rows])
            try:
                loader.batch(rows, rows)
            except DataError as error:
                result.error(str(error), "correct the data set")
                break
        bad = loader.bad_images
        if bad:
            listed = [f"{file} ({reason})" for file, reason in list(bad.items())[:LISTED]]
            listed += [f"and {len(bad) - LISTED} more"] * (len(bad) > LISTED)
            report(f"{len(bad)} of {total} of {name} cannot be used: {', '.join(listed)}", HINT)
        else:
            result.ok(f"{total} of {name} decoded")


def _splits(result: ResultBuilder, config: Config) -> list[tuple[str, Any]]:
    """(name, images) of the splits; [] for a source without files, and after an error, which is reported."""
    if SOURCES[config.data.source].in_memory:
        result.ok(f"{config.data.source}: no files needed")
        return []
    try:
        return list(open_splits(config))
    except ConfigError as error:
        Problem.from_error(error).report(result, default_fix="see docs/data.md for the layout of a data set")
        return []
    except StorageError as error:
        result.error(str(error), "see docs/data.md")
        return []


def _loader(split: Any, name: str, config: Config) -> DecodedImages:
    """Decodes the images of a split, and does nothing with them."""
    return DecodedImages(
        split,
        transform=lambda pixels, out, position: None,
        size=1,
        classes=stated_classes(split) or MAX_CLASSES,  # of data given by a function that does not state it
        threads=config.data.threads,
        on_bad_image="ignore",
        kind=f"image of {name}",
    )
