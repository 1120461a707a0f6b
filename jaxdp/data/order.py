"""The order of samples, a pure function of (seed, samples seen)."""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, examples: int) -> np.ndarray:
    """The shuffled ids of one epoch, int64 [examples]."""
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(examples)
    order.flags.writeable = False
    return order


def sample_ids(seed: int, positions, examples: int) -> np.ndarray:
    """The id of the sample at each position. positions: [B] samples seen, not necessarily of one epoch."""
    positions = np.asarray(positions, np.int64)
    epochs, places = np.divmod(positions, examples)
    ids = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        ids[here] = permutation(seed, int(epoch), examples)[places[here]]
    return ids
