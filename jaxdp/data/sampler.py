"""The order of samples, a pure function of (seed, number of samples seen)."""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, examples: int) -> np.ndarray:
    """The shuffled ids of one epoch, int64 [examples], read-only."""
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(examples)
    order.flags.writeable = False
    return order


def sample_ids(seed: int, positions: np.ndarray, examples: int) -> np.ndarray:
    """The id of the sample at each position, int64 [B]. positions: [B] samples seen before; they may span epochs."""
    positions = np.asarray(positions, np.int64)
    epochs, offsets = np.divmod(positions, examples)
    ids = np.empty_like(positions)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        ids[mask] = permutation(seed, int(epoch), examples)[offsets[mask]]
    return ids


def repeated_positions(offsets: np.ndarray, *, first: int, global_batch: int, repeats: int) -> np.ndarray:
    """The position in the order of images, int64, of rows of the batch that starts after `first` samples.

    Repeated augmentation: the batch holds global_batch / repeats images of the order, from number first / repeats on, one after
    the other, `repeats` times. The copies of an image are on different workers if there are at least `repeats` (Hoffer et al.,
    arXiv 1901.09335; Berman et al., arXiv 1902.05509). offsets: rows of the batch, from 0. global_batch must be a multiple of
    `repeats`.
    """
    return first // repeats + np.asarray(offsets, np.int64) % (global_batch // repeats)
