"""TensorBoard events: scalars, held-out images with their predicted classes, the configuration and the mesh."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxdp.config import HELD_OUT_LABELS, Config, training_labels
from jaxdp.planning import PlannedPhase
from jaxdp.validation import flatten, to_json

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

TILE, LINE, COLUMNS = 160, 17, 4  # pixels, pixels, images per row
CORRECT, INCORRECT = (0, 0, 0), (213, 94, 0)  # RGB; distinguishable for color-blind readers (Okabe & Ito)
ACCURACY_TAG = "evaluation/accuracy"
EXAMPLES_TAG = "examples/held_out"  # not a scalar's tag: TensorBoard shows only one kind of data per tag


class RunInfo(NamedTuple):
    """Facts about a whole run. mesh: Markdown. class_names: may be shorter than the number of classes."""

    config: Config
    mesh: str
    class_names: tuple[str, ...] = ()


def mesh_table(phases: Sequence[PlannedPhase], device_kind: str, strategy_of: Callable[[PlannedPhase], str]) -> str:
    """The mesh of every phase as a Markdown table."""
    names = ("phase", "mesh", "global batch", "per-worker batch", "micro-batches", "images", "all-reduce")
    rows = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for phase in phases:
        rows.append(
            f"| {phase.index} | {phase.vertical}x{phase.horizontal} {device_kind} | {phase.global_batch} | "
            f"{phase.per_worker_batch} | {phase.accumulation} | {phase.image_size}x{phase.image_size} | {strategy_of(phase)} |"
        )
    return "\n".join(rows)


class TensorBoard:
    """Writes every number of a record as a scalar over samples seen, so that runs of different batch sizes are comparable.

    The run's configuration and mesh are text summaries. The config fields are hyperparameters, which the HParams page compares
    by the last held-out accuracy.
    """

    def __init__(self, directory: Path, samples: int, run_info: RunInfo | None = None) -> None:
        """samples: samples seen by the run; events beyond these, from an interrupted session, are hidden."""
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=samples + 1 if samples else None)
        self.class_names = run_info.class_names if run_info else ()
        self.descriptions = {"eval_loss": f"Cross entropy on held-out images with {HELD_OUT_LABELS}"}
        if run_info:
            text = f"Cross entropy on training batches with {training_labels(run_info.config)}"
            self.descriptions["loss"] = f"{text}; not comparable with evaluation/loss unless both have {HELD_OUT_LABELS}"
            self._write_run_info(run_info, samples)

    def _write_run_info(self, run_info: RunInfo, samples: int) -> None:
        from tensorboardX.summary import hparams

        config = "".join(f"    {line}\n" for line in to_json(run_info.config).splitlines())
        self.writer.add_text("config", config, samples)
        self.writer.add_text("mesh", run_info.mesh, samples)
        fields = flatten(dataclasses.asdict(run_info.config))
        simple = {name: v if isinstance(v, (bool, int, float, str)) else str(v) for name, v in fields.items()}
        *started, _ = hparams(simple, {ACCURACY_TAG: 0.0})  # the last summary marks the run as successful
        for summary in started:
            self.writer.file_writer.add_summary(summary)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name not in ("step", "samples"):
                group = "evaluation" if name.startswith("eval_") else "training"
                tag, text = f"{group}/{name.removeprefix('eval_')}", self.descriptions.get(name, "")
                self.writer.add_scalar(tag, value, record["samples"], summary_description=text)

    def write_examples(self, record: dict[str, Any], *arrays: np.ndarray) -> None:
        """Write one image with a tile for each example: its label and, on an orange background, a wrong prediction.

        arrays: images, labels and predicted classes.
        """
        if len(arrays[0]):
            tiles = [self._tile(*example) for example in zip(*arrays, strict=True)]
            blank = np.zeros_like(tiles[0])
            rows = [tiles[first : first + COLUMNS] for first in range(0, len(tiles), COLUMNS)]
            width = min(COLUMNS, len(tiles))
            grid = np.vstack([np.hstack([*row, *[blank] * (width - len(row))]) for row in rows])
            self.writer.add_image(EXAMPLES_TAG, grid, record["samples"], dataformats="HWC")

    def _tile(self, image: np.ndarray, label: int, predicted: int) -> np.ndarray:
        from PIL import Image, ImageDraw

        tile = Image.new("RGB", (TILE, TILE + 2 * LINE + 4), CORRECT if label == predicted else INCORRECT)
        tile.paste(Image.fromarray(image).resize((TILE, TILE), Image.Resampling.NEAREST), (0, 0))
        draw, lines = ImageDraw.Draw(tile), [self._name(label)]
        if label != predicted:
            lines.append(f"predicted {self._name(predicted)}")
        for number, text in enumerate(lines):
            draw.text((4, TILE + 1 + LINE * number), _shorten(draw, text, TILE - 8), fill="white", font=_font())
        return np.asarray(tile)

    def _name(self, label: int) -> str:
        return self.class_names[label] if label < len(self.class_names) else str(label)

    def close(self) -> None:
        self.writer.close()


@cache
def _font() -> "FreeTypeFont":
    """A font with more than the English letters."""
    from matplotlib.font_manager import findfont
    from PIL import ImageFont

    return ImageFont.truetype(findfont("DejaVu Sans"), 12)


def _shorten(draw: "ImageDraw", text: str, width: int) -> str:
    """The text with its middle replaced by "…" if it is wider than `width` pixels."""
    kept = len(text)
    shown = text
    while kept > 2 and draw.textlength(shown, font=_font()) > width:
        kept -= 1
        shown = f"{text[: -(-kept // 2)]}…{text[len(text) - kept // 2 :]}"
    return shown
