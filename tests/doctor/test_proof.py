"""Results of proofs."""

import math

import numpy as np
import pytest

from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.doctor.proof import build_on_all_ranks, largest_difference, prove, worst


@pytest.mark.parametrize(("difference", "passed"), [(1e-6, True), (1e-5, True), (2e-5, False), (math.nan, False)])
def test_prove_passes_up_to_the_tolerance(difference, passed):
    proof = prove("gradient", "a with b", tolerance=1e-5, difference=lambda: difference)
    assert (proof.passed, proof.to_dict()["difference"]) == (passed, None if math.isnan(difference) else difference)


def test_prove_with_an_exception_fails_with_its_first_line():
    def broken():
        raise RuntimeError("no such link\nand more")

    proof = prove("gradient", "a with b", tolerance=1e-5, difference=broken)
    assert (proof.passed, proof.error) == (False, "RuntimeError: no such link")


def test_worst_of_several_ranks_is_an_error_then_a_nan_then_the_largest_difference():
    assert worst([(0.0, None), (0.5, None), (0.1, None)]) == (0.5, None)
    assert math.isnan(worst([(0.0, None), (math.nan, None), (9.0, None)])[0])
    assert worst([(0.0, None), (None, "OSError: disk full")]) == (None, "rank 1: OSError: disk full")


def test_largest_difference_is_zero_only_for_equal_bits():
    arrays = {"a": np.array([0.0, 1.0], np.float32), "b": np.array([3], np.int32)}
    assert largest_difference(arrays, {name: value.copy() for name, value in arrays.items()}) == 0
    assert largest_difference(arrays, arrays | {"a": np.array([0.0, 1.5], np.float32)}) == 0.5
    assert 0 < largest_difference(arrays, arrays | {"a": np.array([-0.0, 1.0], np.float32)}) < 1e-300
    assert largest_difference(arrays, arrays | {"a": np.array([np.nan, 1.0], np.float32)}) == math.inf
    assert largest_difference(arrays, {"a": arrays["a"]}) == math.inf


def test_build_on_all_ranks_with_an_error_on_one_rank_raises_on_all():
    class TwoProcesses(ProcessGroup):
        num_processes = 2

        def all_gather_object(self, name, value, while_waiting=None):
            return [value, "XlaRuntimeError: out of memory"]

    with pytest.raises(RuntimeError, match="rank 1: XlaRuntimeError: out of memory"):
        build_on_all_ranks(TwoProcesses(), "a proof", lambda: "compiled on rank 0")
