"""Timing of reductions: alternation, exact inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.parallel import timing
from jaxdp.parallel.mesh import make_mesh
from jaxdp.strategies import STRATEGIES


def test_time_alternately_takes_turns_and_drops_first_round(monkeypatch):
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    ticks = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    assert timing.time_alternately(calls, 2) == {"a": [1, 1], "b": [1, 1]}
    assert order == ["a", "b"] * 3


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


@pytest.mark.parametrize("devices", [2, 3, 12, 51, 300])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_exact_inputs_sum_exactly_in_any_order(dtype, devices):
    numbers = timing.exact_inputs(jnp.dtype(dtype), devices)
    parts = numbers.astype(dtype)
    np.testing.assert_array_equal(parts.astype(np.float64), numbers)
    assert (numbers.max(0) > 0).mean() > 0.9
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
