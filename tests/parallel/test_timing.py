"""Timing of reductions: alternation, exact inputs."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jaxdp.parallel import timing
from jaxdp.parallel.mesh import make_mesh
from jaxdp.strategies import STRATEGIES


class Clock:
    """A clock that only calls, waiting for their results, and checks move."""

    def __init__(self, monkeypatch):
        self.now, self.order = 0.0, []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def pass_(self, seconds, what):
        self.now += seconds
        self.order.append(what)

    def call(self, name, to_start, to_finish):
        """A call that returns at once what is ready later."""

        def started():
            self.pass_(to_start, name)
            return SimpleNamespace(name=name, block_until_ready=lambda: self.pass_(to_finish, f"{name} ready"))

        return started


@pytest.mark.parametrize("repeats", [0, 1, 2])
def test_time_alternately_takes_turns_and_drops_first_round(repeats, monkeypatch):
    clock = Clock(monkeypatch)
    calls = {"a": clock.call("a", 1.0, 2.0), "b": clock.call("b", 0.5, 0.0)}
    seconds = timing.time_alternately(calls, repeats, lambda name, out: clock.pass_(50.0, f"{name} is {out.name}"))
    assert seconds == {"a": [3.0] * repeats, "b": [0.5] * repeats}
    assert clock.order == ["a", "a ready", "a is a", "b", "b ready", "b is b"] * (repeats + 1)
    assert timing.time_alternately(calls, repeats) == seconds


class Sometimes:
    """A reduction whose results are wrong in some calls."""

    def __init__(self, *exact):
        self.exact = iter(exact)

    def __call__(self):
        return next(self.exact)

    def is_exact(self, out):
        return out


def test_time_reductions_counts_wrong_sums_of_all_calls():
    reductions = {"a": Sometimes(True, True, True), "b": Sometimes(False, True, False)}
    seconds, inexact = timing.time_reductions(reductions, 2)
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}
    assert inexact == {"a": 0, "b": 2}


def test_counts_are_the_largest_of_all_processes(monkeypatch):
    counts = {"a": 3, "b": 0}
    assert timing.max_over_processes(counts) == counts
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: np.stack([own, np.array([1, 7], own.dtype)]))
    found = timing.max_over_processes(counts)
    assert found == {"a": 3, "b": 7}
    assert {type(value) for value in found.values()} == {int}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_reduction_returns_the_exact_sum_of_the_tree(name, times):
    shapes = {"a": jnp.zeros((3, 5)), "b": jnp.zeros(9000, jnp.bfloat16)}
    reduction = timing.Reduction(make_mesh(2, 4), shapes, name, repetitions=times)
    given = jax.tree.map(np.asarray, reduction.inputs)
    out = reduction()
    assert reduction.is_exact(out)
    for key, shape in (("a", (3, 5)), ("b", (9000,))):
        assert out[key].shape == (8, *shape)
        expected = np.broadcast_to(given[key].astype(np.float64).sum(0), out[key].shape)
        np.testing.assert_array_equal(np.asarray(out[key], np.float64), expected)
        assert len(np.unique(given[key].astype(np.float64))) > 2


def test_reduction_repetitions_stay_in_the_loop():
    reduction = timing.Reduction(make_mesh(2, 4), jnp.zeros(1000), "psum", repetitions=3)
    body = next(part for part in reduction.compiled.as_text().split("\n\n") if "all-reduce" in part)
    assert "ENTRY" not in body  # not hoisted out of the loop


def test_period_of_the_inputs_is_a_prime():
    assert all(timing.PERIOD % factor for factor in range(2, 1 + math.isqrt(timing.PERIOD)))


@pytest.mark.parametrize("devices", [2, 3, 12, 51, 256, 300])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_exact_inputs_sum_exactly_in_any_order(dtype, devices):
    numbers = timing.exact_inputs(jnp.dtype(dtype), devices)
    parts = numbers.astype(dtype)
    np.testing.assert_array_equal(parts.astype(np.float64), numbers)
    largest = 2 ** (jnp.finfo(dtype).nmant + 1)  # all integers up to this are exact
    assert numbers.shape == (devices, timing.PERIOD)
    top = max(1, largest // devices)
    assert 0 <= numbers.min() <= numbers.max() <= top
    assert top > 2000 or np.array_equal(np.unique(numbers), np.arange(top + 1))
    assert largest / 2.2 < numbers.sum(0).max() <= largest
    assert (numbers.max(0) > 0).mean() > 0.9
    assert (numbers.max(1) > 0).all()
    for order in (np.arange(devices), np.random.default_rng(0).permutation(devices)):
        total = parts[order[0]]
        for device in order[1:]:
            total = (total + parts[device]).astype(dtype)
        np.testing.assert_array_equal(total.astype(np.float64), numbers.sum(0))


@pytest.mark.parametrize(("dtype", "devices"), [("float16", 7), ("bfloat16", 7), ("float16", 3)])
def test_reduction_over_odd_device_counts_is_exact_in_16_bits(dtype, devices):
    for name in ("psum", "ring"):
        shape = jax.ShapeDtypeStruct((20_000,), jnp.dtype(dtype))
        reduction = timing.Reduction(make_mesh(1, devices), shape, name, bucket_bytes=None)
        assert reduction.is_exact(reduction())


@pytest.mark.parametrize("repetitions", [1, 2])
def test_a_sum_that_differs_in_one_bit_on_one_device_is_not_exact(repetitions):
    """Anywhere: in the periods that are complete, in the last one, and in a tensor smaller than a period."""
    shapes = {"large": jnp.zeros(2 * timing.PERIOD + 5), "small": jnp.zeros((2, 3), jnp.bfloat16)}
    for wire_dtype in (None, "bfloat16"):
        reduction = timing.Reduction(make_mesh(1, 2), shapes, "psum", wire_dtype=wire_dtype, repetitions=repetitions)
        out = reduction()
        assert reduction.is_exact(out) is True
        for name, place in (("large", 0), ("large", -6), ("large", -5), ("large", -1), ("small", 3)):
            values = np.array(out[name])
            bits = values.view(f"u{values.itemsize}").reshape(2, -1)
            bits[1, place] ^= 1
            assert reduction.is_exact(out | {name: jax.device_put(values, out[name].sharding)}) is False


def test_inputs_of_a_reduction_follow_the_wire_dtype():
    single, half = (
        timing.Reduction(make_mesh(1, 2), jnp.zeros(9), "psum", wire_dtype=wire).inputs for wire in (None, "bfloat16")
    )
    assert np.max(single) > 2**8 >= 2 * np.max(half)
    assert {leaf.sharding.device_set == set(jax.devices()[:2]) for leaf in (single, half)} == {True}
