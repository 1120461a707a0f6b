"""Check of the recipe's data set: every image can be decoded."""

from collections.abc import Callable

import numpy as np

from jaxdp.choices import SOURCES
from jaxdp.config import MAX_CLASSES, Config
from jaxdp.data.batch_sources import DataError, DecodedImages
from jaxdp.data.datasets import stated_classes
from jaxdp.data.sources import source_of
from jaxdp.doctor.check_result import ResultBuilder
from jaxdp.errors import plural

HINT = "replace or remove what cannot be read, or train with --data.on-bad-image skip"
IMAGES_AT_A_TIME, LISTED = 4096, 100


def check_images(result: ResultBuilder, config: Config, info: Callable[[str], None]) -> None:
    """Decode every image of the training and the evaluation split with the threads of training.

    info: receives progress. Raises ConfigError or StorageError for a data set that cannot be opened.
    """
    if SOURCES[config.data.source].in_memory:
        return result.ok(f"{config.data.source}: no files needed")
    report = result.warning if config.data.on_bad_image == "skip" else result.error
    for name, split in source_of(config).splits(config):
        total = plural(len(split), "image", ",")
        info(f"decoding {total} of {name} ...")
        loader = DecodedImages(
            split,
            transform=lambda pixels, out, position: None,
            size=1,
            target=stated_classes(split) or MAX_CLASSES,  # data given by a function may not state it
            threads=config.data.threads,
            on_bad_image="ignore",
            kind=f"image of {name}",
        )
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
