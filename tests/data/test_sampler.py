"""The order of samples."""

import itertools

import numpy as np

from jaxdp.data.sampler import permutation, sample_ids


def test_sample_ids_shuffle_every_epoch_differently():
    ids = sample_ids(5, np.arange(3 * 101), 101).reshape(3, 101)
    for epoch in ids:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(101))
    assert not np.array_equal(ids[0], ids[1])
    assert not np.array_equal(ids[0], sample_ids(6, np.arange(101), 101))


def test_sample_ids_do_not_depend_on_grouping_into_batches():
    whole = sample_ids(1, np.arange(1000), 77)
    cuts = [0, 13, 77, 80, 250, 777, 1000]
    parts = [sample_ids(1, np.arange(a, b), 77) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_permutation_is_the_documented_numpy_stream():
    expected = np.random.Generator(np.random.Philox(key=[9, 4])).permutation(1000)
    np.testing.assert_array_equal(permutation(9, 4, 1000), expected)


def test_sample_ids_of_late_epoch_shuffle_that_epoch_only():
    examples, position = 1_281_167, 57 * 1_281_167 + 400_000
    expected = np.random.Generator(np.random.Philox(key=[3, 57])).permutation(examples)[400_000:400_005]
    permutation.cache_clear()
    np.testing.assert_array_equal(sample_ids(3, np.arange(position, position + 5), examples), expected)
    assert permutation.cache_info().misses == 1  # one epoch was shuffled, none of the 57 before
