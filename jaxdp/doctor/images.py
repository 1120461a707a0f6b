"""The data of a recipe: there, readable, and of no more classes than the model has."""

from pathlib import Path

from jaxdp.config import IN_MEMORY, Config, ConfigError
from jaxdp.data.decode import ImageError, decode
from jaxdp.data.folder import evaluation_split
from jaxdp.data.sources import open_split
from jaxdp.doctor.finding import Findings, told_apart


def data(findings: Findings, config: Config) -> None:
    """Opens the training and the evaluation split, and decodes the first image of each; the others are not read."""
    asked = config.data
    if asked.source in IN_MEMORY:
        findings.ok(f"{asked.source}: nothing to read")
        return
    try:
        train = open_split(asked, asked.train_split)
        parts = {asked.train_split: train}
        if asked.source == "folder":
            held_out = evaluation_split(Path(asked.directory), asked.eval_split)
            parts[held_out] = open_split(asked, held_out, train.classes)
        elif asked.eval_split is not None:
            parts[asked.eval_split] = open_split(asked, asked.eval_split)
    except ConfigError as error:
        findings.wrong(*told_apart(str(error), "see docs/data.md for what a data set must have"))
        return
    classes = train.classes if isinstance(train.classes, int) else len(train.classes)
    for name, part in parts.items():
        findings.ok(f"{name}: {len(part):,} images")
        try:
            image = part[0][0]
            if isinstance(image, bytes):
                decode(image)
        except ImageError as error:
            found = f"the first image of {name} cannot be read: {error}"
            findings.wrong(found, "mend or remove it, or give --data.on-bad-image skip")
    if classes > config.model.classes:
        findings.wrong(f"{classes} classes, and the model has {config.model.classes}", f"give --model.classes {classes}")
    else:
        findings.ok(f"{classes} classes")
