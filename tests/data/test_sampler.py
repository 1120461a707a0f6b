"""The order of samples."""

import itertools

import numpy as np
import pytest

from jaxdp.data.sampler import permutation, repeated_positions, sample_ids


def test_sample_ids_do_not_depend_on_grouping_into_batches():
    whole = sample_ids(1, np.arange(1000), 77)
    cuts = [0, 13, 77, 80, 250, 777, 1000]
    parts = [sample_ids(1, np.arange(a, b), 77) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_sample_ids_of_late_epoch_shuffle_that_epoch_only():
    examples, position = 1_281_167, 57 * 1_281_167 + 400_000
    expected = np.random.Generator(np.random.Philox(key=[3, 57])).permutation(examples)[400_000:400_005]
    permutation.cache_clear()
    np.testing.assert_array_equal(sample_ids(3, np.arange(position, position + 5), examples), expected)
    assert not permutation(3, 57, examples).flags.writeable  # all callers share it
    assert permutation.cache_info().misses == 1  # one epoch was shuffled, none of the 57 before


@pytest.mark.parametrize(("batch", "repeats"), [(12, 3), (16, 3), (7, 4), (3, 5), (5, 1)])
def test_repeated_batches_of_any_size_hold_copies_in_different_blocks(batch, repeats):
    """Of the samples p from `first` on, image p // repeats, by counting; copies are about a block's length apart."""
    for first in (0, batch, 5 * batch):
        rows = repeated_positions(np.arange(batch), first=first, global_batch=batch, repeats=repeats)
        expected = sorted(p // repeats for p in range(first, first + batch))
        assert sorted(rows.tolist()) == expected
        apart = [np.diff(np.flatnonzero(rows == image)).min(initial=batch) for image in np.unique(rows)]
        assert min(apart) >= max(1, batch // repeats - 1)
        some = np.array([batch - 1, 0, batch // 2])
        np.testing.assert_array_equal(repeated_positions(some, first=first, global_batch=batch, repeats=repeats), rows[some])


def test_repeated_batches_of_phases_use_every_image_of_every_epoch_equally_often():
    """Phases of batches 4 and 12 with three repeats: nothing is dropped between batches, phases or epochs of the order."""
    starts = [*range(0, 60, 4), *range(60, 300, 12)]
    batches = zip(starts, [*starts[1:], 300], strict=True)
    order = [repeated_positions(np.arange(b - a), first=a, global_batch=b - a, repeats=3) for a, b in batches]
    positions, counts = np.unique(np.concatenate(order), return_counts=True)
    np.testing.assert_array_equal(positions, np.arange(100))
    assert (counts == 3).all()
    ids = sample_ids(2, np.concatenate(order), 25)
    assert (np.bincount(ids) == 12).all()  # four epochs of 25 images, three times
