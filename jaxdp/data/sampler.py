"""The order of samples, a pure function of (seed, number of samples seen)."""

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
    """Random numbers in [0, 1) that draw the images of one epoch, float64 [examples]."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).random(examples)


def sample_ids(seed: int, positions: np.ndarray, examples: int) -> np.ndarray:
    """The id of the sample at each position, int64 [B]. positions: [B] samples seen before; they may span epochs."""
    positions = np.asarray(positions, np.int64)
    epochs, offsets = np.divmod(positions, examples)
    ids = np.empty_like(positions)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        ids[mask] = permutation(seed, int(epoch), examples)[offsets[mask]]
    return ids


def drawn_ids(seed: int, positions: np.ndarray, cumulative: np.ndarray) -> np.ndarray:
    """The id of the sample at each position, int64 [B], drawn with replacement. positions: as of `sample_ids`.

    cumulative: float64 [examples], for each image the probability of drawing it or an earlier one.
    """
    places = (divmod(position, len(cumulative)) for position in np.asarray(positions).tolist())
    numbers = [uniforms(seed, epoch, len(cumulative))[offset] for epoch, offset in places]
    return np.searchsorted(cumulative, numbers, side="right")


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
