"""TensorBoard events: scalars, a few images with what the network takes them for, the configuration, the mesh."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdp.config import Config
from jaxdp.validation import flatten, to_json

TILE, LINE, COLUMNS = 160, 17, 4  # pixels, pixels, images in a row
RIGHT, WRONG = (0, 0, 0), (213, 94, 0)  # told apart by the colour-blind (Okabe & Ito)
ACCURACY = "evaluation/accuracy"
PICTURE = "examples/held_out"  # beside the scalars: TensorBoard shows a tag in one way only


class About(NamedTuple):
    """What is said of a run as a whole. mesh: Markdown; class_names: as far as the classes have names."""

    config: Config
    mesh: str
    class_names: tuple[str, ...] = ()


def mesh_table(phases, device_kind: str, strategy_of) -> str:
    """The mesh of every phase, as Markdown."""
    rows = ["| phase | mesh | global batch | per-worker batch | micro-batches | all-reduce |", "|---|---|---|---|---|---|"]
    for phase in phases:
        rows.append(
            f"| {phase.index} | {phase.vertical}x{phase.horizontal} {device_kind} | {phase.global_batch} | "
            f"{phase.per_worker_batch} | {phase.accumulation} | {strategy_of(phase)} |"
        )
    return "\n".join(rows)


class TensorBoard:
    """Every number of a record as a scalar over samples seen, so that runs of different batch sizes lie side by side.

    The run's configuration and mesh are texts; its fields are the hyperparameters that the HParams page compares by the last
    held-out accuracy.
    """

    def __init__(self, directory: Path, samples: int, about: About | None = None):
        """samples: what was written beyond these, by a session that was cut off, is not to be shown."""
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=samples + 1 if samples else None)
        self.class_names = about.class_names if about else ()
        if about:
            self._tell(about, samples)

    def _tell(self, about: About, samples: int) -> None:
        from tensorboardX.summary import hparams

        config = "".join(f"    {line}\n" for line in to_json(about.config).splitlines())
        self.writer.add_text("config", config, samples)
        self.writer.add_text("mesh", about.mesh, samples)
        fields = flatten(dataclasses.asdict(about.config))
        simple = {name: v if isinstance(v, (bool, int, float, str)) else str(v) for name, v in fields.items()}
        *begun, _ = hparams(simple, {ACCURACY: 0.0})  # the last one says that the run has succeeded
        for summary in begun:
            self.writer.file_writer.add_summary(summary)

    def write(self, record):
        for name, value in record.items():
            if name not in ("step", "samples"):
                group = "evaluation" if name.startswith("eval_") else "training"
                self.writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, record["samples"])

    def write_examples(self, record, images, labels, predicted):
        """One picture of all of them, each with its label and the class predicted for it, mistakes in orange."""
        if len(images):
            tiles = [self._tile(*one) for one in zip(images, labels, predicted, strict=True)]
            blank = np.zeros_like(tiles[0])
            rows = [tiles[first : first + COLUMNS] for first in range(0, len(tiles), COLUMNS)]
            width = min(COLUMNS, len(tiles))
            picture = np.vstack([np.hstack([*row, *[blank] * (width - len(row))]) for row in rows])
            self.writer.add_image(PICTURE, picture, record["samples"], dataformats="HWC")

    def _tile(self, image, label: int, predicted: int) -> np.ndarray:
        from PIL import Image, ImageDraw

        tile = Image.new("RGB", (TILE, TILE + 2 * LINE + 4), RIGHT if label == predicted else WRONG)
        tile.paste(Image.fromarray(image).resize((TILE, TILE), Image.Resampling.NEAREST), (0, 0))
        draw, lines = ImageDraw.Draw(tile), [self._name(label)]
        if label != predicted:
            lines.append(f"taken for {self._name(predicted)}")
        for number, text in enumerate(lines):
            draw.text((4, TILE + 1 + LINE * number), _fitting(draw, text, TILE - 8), fill="white", font=_font())
        return np.asarray(tile)

    def _name(self, label: int) -> str:
        return self.class_names[label] if label < len(self.class_names) else str(label)

    def close(self):
        self.writer.close()


@cache
def _font():
    """One that has more letters than English needs."""
    from matplotlib.font_manager import findfont
    from PIL import ImageFont

    return ImageFont.truetype(findfont("DejaVu Sans"), 12)


def _fitting(draw, text: str, width: int) -> str:
    """The text, or as much of its beginning and end as is so many pixels wide."""
    kept = len(text)
    shown = text
    while kept > 2 and draw.textlength(shown, font=_font()) > width:
        kept -= 1
        shown = f"{text[: -(-kept // 2)]}…{text[len(text) - kept // 2 :]}"
    return shown
