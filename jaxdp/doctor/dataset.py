"""Check of the recipe's data set: present, readable, and with no more classes than the model."""

from pathlib import Path
from typing import Any

from jaxdp.config import IN_MEMORY, Config
from jaxdp.data.decode import ImageError, decode
from jaxdp.data.image_folder import evaluation_split
from jaxdp.data.sources import open_split
from jaxdp.doctor.check_result import Problem, ResultBuilder
from jaxdp.errors import ConfigError, plural


def check_data(result: ResultBuilder, config: Config) -> None:
    """Open the training and the evaluation split, and decode the first image of each."""
    settings = config.data
    if settings.source in IN_MEMORY:
        result.ok(f"{settings.source}: no files needed")
        return
    try:
        train: Any = open_split(settings, settings.train_split)
        splits: dict[str, Any] = {settings.train_split: train}
        if settings.source == "folder" and settings.directory is not None:
            name = evaluation_split(Path(settings.directory), settings.eval_split)
            splits[name] = open_split(settings, name, train.classes)
        elif settings.eval_split is not None:
            splits[settings.eval_split] = open_split(settings, settings.eval_split)
    except ConfigError as error:
        Problem.from_error(error).report(result, default_fix="see docs/data.md for the layout of a data set")
        return
    classes = train.classes if isinstance(train.classes, int) else len(train.classes)
    for name, split in splits.items():
        result.ok(f"{name}: {plural(len(split), 'image', ',')}")
        try:
            image = split[0][0]
            if isinstance(image, bytes):
                decode(image)
        except ImageError as error:
            message = f"cannot read the first image of {name}: {error}"
            result.error(message, "replace or remove it, or give --data.on-bad-image skip")
    if classes > config.model.classes:
        result.error(f"{plural(classes, 'class')}, but the model has {config.model.classes}", f"give --model.classes {classes}")
    else:
        result.ok(f"{plural(classes, 'class')}")
