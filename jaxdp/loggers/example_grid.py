"""Held-out images with their labels and predicted classes as one image."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

TILE, LINE, COLUMNS = 160, 17, 4  # pixels, pixels, images per row
CORRECT, INCORRECT = (0, 0, 0), (213, 94, 0)  # RGB; distinguishable for color-blind readers (Okabe & Ito)


def example_grid(images: np.ndarray, labels: Any, predicted: Any, *, class_names: Sequence[str] = ()) -> np.ndarray:
    """One tile for each example, uint8 [H, W, 3]: its label and, on an orange background, a wrong prediction.

    images: uint8 [E, H, W, 3]; E is at least 1. labels, predicted: classes [E], several labels for each
    image, [E, C], or texts. class_names: may be shorter than the number of classes.
    """
    tiles = [_tile(*example, class_names=class_names) for example in zip(images, labels, predicted, strict=True)]
    blank = np.zeros_like(tiles[0])
    rows = [tiles[first : first + COLUMNS] for first in range(0, len(tiles), COLUMNS)]
    width = min(COLUMNS, len(tiles))
    return np.vstack([np.hstack([*row, *[blank] * (width - len(row))]) for row in rows])


def _tile(image: np.ndarray, label: Any, predicted: Any, *, class_names: Sequence[str]) -> np.ndarray:
    from PIL import Image, ImageDraw

    is_correct = np.array_equal(label, predicted)
    color = CORRECT if is_correct or isinstance(label, str) else INCORRECT
    tile = Image.new("RGB", (TILE, TILE + 2 * LINE + 4), color)
    tile.paste(Image.fromarray(image).resize((TILE, TILE), Image.Resampling.NEAREST), (0, 0))
    draw, lines = ImageDraw.Draw(tile), [_name(label, class_names)]
    if not is_correct:
        lines.append(f"predicted {_name(predicted, class_names)}")
    for number, text in enumerate(lines):
        draw.text((4, TILE + 1 + LINE * number), text, fill="white", font=_font())
    return np.asarray(tile)


def _name(label: Any, class_names: Sequence[str]) -> str:
    """The name of a class, or of all labels of an image."""
    if isinstance(label, str):  # of a registered task
        return label
    present = [int(label)] if label.ndim == 0 else np.flatnonzero(label).tolist()
    return ", ".join(class_names[one] if one < len(class_names) else str(one) for one in present) or "none"


@cache
def _font() -> "FreeTypeFont":
    """A font with more than the English letters."""
    from matplotlib.font_manager import findfont
    from PIL import ImageFont

    return ImageFont.truetype(findfont("DejaVu Sans"), 12)
