"""The order of samples, a pure function of (seed, number of samples seen)."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, examples: int) -> np.ndarray:
    """The shuffled ids of one epoch, int64 [examples], read-only."""
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(examples)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=4)
def uniforms(seed: int, epoch: int, examples: int) -> np.ndarray:
    """Random numbers in [0, 1) that draw the images of one epoch, float64 [examples], read-only."""
    numbers = np.random.Generator(np.random.Philox(key=[seed, epoch])).random(examples)
    numbers.flags.writeable = False
    return numbers


def sample_ids(seed: int, positions: np.ndarray, examples: int) -> np.ndarray:
    """The id of the sample at each position, int64 [B]. positions: [B] samples seen before; they may span epochs."""
    return _at(positions, examples, lambda epoch: permutation(seed, epoch, examples), dtype=np.int64)


def drawn_ids(seed: int, positions: np.ndarray, cumulative: np.ndarray) -> np.ndarray:
    """The id of the sample at each position, int64 [B], drawn with replacement. positions: as of `sample_ids`.

    cumulative: float64 [examples], for each image the probability of drawing it or an earlier one.
    """
    examples = len(cumulative)
    numbers = _at(positions, examples, lambda epoch: uniforms(seed, epoch, examples), dtype=np.float64)
    return np.searchsorted(cumulative, numbers, side="right")


def _at(positions: np.ndarray, examples: int, values: Callable[[int], np.ndarray], *, dtype: type) -> np.ndarray:
    """The value at each position, [B]. values: epoch -> [examples]."""
    epochs, offsets = np.divmod(np.asarray(positions, np.int64), examples)
    found: np.ndarray = np.empty(epochs.shape, dtype)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        found[mask] = values(int(epoch))[offsets[mask]]
    return found


def repeated_positions(offsets: np.ndarray, *, first: int, global_batch: int, repeats: int) -> np.ndarray:
    """The position in the order of images, int64, of rows of the batch that starts after `first` samples.

    Repeated augmentation (Hoffer et al., arXiv 1901.09335; Berman et al., arXiv 1902.05509): sample p of the run is a copy of
    image p // repeats of the order. The batch holds the samples in `repeats` blocks, one of each remainder of p - first by
    `repeats`, so that the copies of an image are on different workers if there are at least as many. offsets: rows of the
    batch, from 0.
    """
    ends = np.cumsum([-(-(global_batch - remainder) // repeats) for remainder in range(repeats)])
    offsets = np.asarray(offsets, np.int64)
    remainders = np.searchsorted(ends, offsets, side="right")
    starts = np.concatenate([[0], ends[:-1]])
    return (first + remainders + repeats * (offsets - starts[remainders])) // repeats
