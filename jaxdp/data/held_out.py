"""`data.holdout`: holds out a share of the images of a data set that has training images alone."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxdp.choices import kind_of_task
from jaxdp.config import Config
from jaxdp.data.batch_sources import ItemSource
from jaxdp.data.classes import names_of
from jaxdp.data.image_folder import normalized
from jaxdp.errors import ConfigError, plural


class Part:
    """Some images of a source, which has all other attributes. rows: [M], their indices in it."""

    def __init__(self, whole: Any, rows: np.ndarray, warnings: Iterable[str] = ()) -> None:
        self.whole, self.rows, self.warnings = whole, rows, list(warnings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.whole[int(self.rows[index])]

    @property
    def labels(self) -> np.ndarray:
        """The labels of these images; missing if the source does not have them in memory, as are other attributes `labels`."""
        labels = np.asarray(self.whole.labels)
        if labels.shape[:1] != (len(self.whole),):
            raise AttributeError("labels")
        return labels[self.rows]

    @property
    def weights(self) -> np.ndarray:
        """Their weights for `data.sampling`; missing as the labels. Raises IndexError for a wrong number of weights."""
        return np.asarray(self.whole.weights)[np.isin(np.arange(len(self.whole)), self.rows)]

    def name(self, index: int) -> str:
        """The name that the source has for the image, or the image's place there."""
        row = int(self.rows[index])
        return self.whole.name(row) if hasattr(self.whole, "name") else f"image {row} of the undivided data"

    def identity(self) -> list[str]:
        """The identity of the source, if it has one, and which of its images these are."""
        return [*getattr(self.whole, "identity", list)(), *map(str, self.rows.tolist())]

    def read_ahead(self, order: Iterable[np.ndarray]) -> None:
        """Let a source that fetches images over a network know the coming order."""
        if hasattr(self.whole, "read_ahead"):
            self.whole.read_ahead(self.rows[batch] for batch in order)


def has_held_out(config: Config, what: str) -> ConfigError:
    """The error for data that need no division."""
    reason, hint = f"the data have the held-out {what}", "use --data.holdout 0"
    return ConfigError("data.holdout", config.data.holdout, reason=reason, hint=hint)


def divide(source: Any, twin: ItemSource, config: Config) -> tuple[Part, Part]:
    """(training images, held-out images). twin: the same images, for the second part: each part is read in its own order."""
    labels = np.asarray(getattr(source, "labels", ()))
    stratified = kind_of_task(config.task) == "classes" and labels.shape == (len(source),) and labels.dtype.kind in "iub"
    groups = labels if stratified else np.zeros(len(source), np.int64)
    names = source.relative_names() if hasattr(source, "relative_names") else list(map(str, range(len(source))))
    mask = held_out_mask(names, groups, config.data.holdout)
    single = np.setdiff1d(groups, groups[mask]).tolist()
    warnings = [*getattr(source, "warnings", ())]
    if single:
        first = (names_of(source) or range(single[0] + 1))[single[0]]
        warnings.append(f"no image is held out of {plural(len(single), 'class')} with a single image, {first} first")
    return Part(source, np.flatnonzero(~mask), warnings), Part(twin, np.flatnonzero(mask))


def held_out_mask(names: Sequence[str], groups: np.ndarray, share: float) -> np.ndarray:
    """Which images are held out, bool [N]: of each group the share with the smallest hashes of their names.

    groups: [N]. Of a group of several, at least one image is held out and one is not. Images of one name stay together.
    """
    texts = (normalized(name).encode("utf-8", "surrogateescape") for name in names)
    hashes = np.array([int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) for text in texts], np.uint64)
    distinct, first, image = np.unique(hashes, return_index=True, return_inverse=True)
    held_out, groups = np.zeros(len(distinct), bool), groups[first]
    order = np.argsort(groups, kind="stable")  # within each group by hash
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        held_out[rows[: min(len(rows) - 1, max(1, int(share * len(rows) + 0.5)))]] = True
    return held_out[image]
