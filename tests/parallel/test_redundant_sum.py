"""Comparison of two sums: which reference is used, what rounding explains, and what is found, by NumPy and fractions."""

from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.strategies import set_stages
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES, HORIZONTAL, abstract_mesh, make_mesh
from jaxdp.parallel.redundant_sum import (
    REFERENCE_REDUCTIONS,
    RoundingBound,
    _collectives,
    compare_sums,
    reference_reduction,
    rounding_bound,
)
from jaxdp.strategies import STRATEGIES

BOTH, COLUMNS_FIRST, RING = REFERENCE_REDUCTIONS


@pytest.mark.parametrize("mesh_shape", [(1, 2), (1, 8), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_reference_reduction_shares_no_collective_with_the_strategy(strategy, mesh_shape):
    """Along one axis, all-reduces over both axes, over the columns and over the rows are the same."""
    reference, mesh = reference_reduction(strategy, *mesh_shape), abstract_mesh(*mesh_shape)
    ours, theirs = _collectives(allreduce.stages_of(strategy), mesh), _collectives(REFERENCE_REDUCTIONS[reference], mesh)
    assert ours
    assert theirs
    assert not ours & theirs
    expected = {"psum": COLUMNS_FIRST if 1 not in mesh_shape else RING, "hierarchical": BOTH if 1 not in mesh_shape else RING}
    expected |= {"torus": RING if mesh_shape[1] == 1 else BOTH}
    assert reference == expected.get(strategy, BOTH)


def looped(vector):
    return lax.while_loop(lambda x: x[0] < 3, allreduce.psum, vector)


def scattered(vector):
    return lax.psum_scatter(vector, AXES, tiled=True)


@pytest.mark.parametrize(
    ("stages", "reference"),
    [
        ([allreduce.all_reduce_columns, allreduce.all_reduce_rows], BOTH),
        ([lambda x: allreduce.psum(allreduce.all_reduce_rows(x)) / lax.axis_size(HORIZONTAL)], RING),
        ([allreduce.all_reduce_columns, scattered], BOTH),
        ([looped], RING),
    ],
)
def test_reference_reduction_of_a_registered_strategy_depends_on_its_collectives(stages, reference, monkeypatch):
    set_stages(monkeypatch, "mine", *stages)
    assert reference_reduction("mine", 2, 4) == reference


@pytest.mark.parametrize(("wire", "unit"), [("float32", 2**-24), ("bfloat16", 2**-8), ("float16", 2**-11)])
@pytest.mark.parametrize(
    ("strategy", "mesh_shape", "additions"), [("ring", (2, 4), 7), ("torus", (2, 4), 4), ("torus", (1024, 512), 1534)]
)
def test_rounding_bound_has_the_errors_of_both_sums(strategy, mesh_shape, additions, wire, unit):
    """Higham's bound of each (section 4.2): as many additions as the strategy's, and as a sum of all devices in any order.

    The sum of magnitudes is a float32 sum too. Each input and each result of an addition may be flushed to zero.
    """
    devices = mesh_shape[0] * mesh_shape[1]
    bound = rounding_bound(strategy, jnp.dtype(wire), vertical=mesh_shape[0], horizontal=mesh_shape[1])
    first = float((1 + Fraction(unit)) ** additions) - 1
    second = np.expm1((devices - 1) * np.log1p(2.0**-24))
    relative = (first + second) / (1 - second)
    assert relative <= bound.relative <= 1.00001 * relative
    assert 2 * (2 * devices - 1) <= bound.absolute / 2**-126 <= 4 * devices
    largest = float(jnp.finfo(wire).max) / (1 + first) / (1 + second)
    assert 0.99999 * largest <= bound.overflow <= largest


ALLOWED = RoundingBound(relative=2**-6, absolute=0.25, overflow=2048.0)
NOTHING = RoundingBound(relative=0.0, absolute=0.0, overflow=2048.0)
NAN, INF = np.nan, np.inf
EACH = np.array([[200, -3, 0, 1], [100, 40, 0, 0], [4, -7, 0, 2]])  # of three devices; sums 304, 30, 0, 3
LARGE = [[1024, 1000, 0, 1]] * 2 + [[0, 0, 0, 2]]  # sums of magnitudes: exactly `overflow`, less, 0, 4
# Contributions of the devices, and what one of them has got in place of the sum, or adds to it.
COMPARISONS = {
    "equal": (EACH, [0, 0, 0, 0]),
    "at the bound": (EACH, [5, -1, 0.25, -0.25]),
    "beyond the bound": (EACH, [5.25, -1.25, 0.5, 0.3125]),
    "small difference last": (EACH, [0, 0, 0, 0.5]),
    "largest difference in the middle": (EACH, [6, -50, 40, 0]),
    "without the first": (EACH, -EACH[0]),
    "without the last": (EACH, -EACH[2]),
    "without the last, one more wrong": (EACH, -EACH[2] - [0, 0, 9, 0]),
    "no number": (EACH, [0, 100, NAN, 0]),
    "infinite": (EACH, [0, INF, 100, 0]),
    "infinite by an overflow": (LARGE, [INF, 0, 0, 0]),
    "infinite below the overflow": (LARGE, [0, INF, 0, 0]),
    "wrong above the overflow": (LARGE, [100, 0, 0, 0]),
    "infinite contribution": ([[INF, 1, 1, 1], *EACH[1:]], [0, 0, 7, 0]),
    "infinite contribution lost": ([[INF, 1, 1, 1], *EACH[1:]], [-INF, 0, 0, 0]),
    "no number contributed": ([[NAN, 1, 1, 1], *EACH[1:]], [1, 0, 0, 0]),
}


def expected_findings(each, first, own, allowed):
    """`compare_sums` in plain words."""
    second, magnitude = each.sum(0), np.abs(each).sum(0)
    bounds = magnitude * allowed.relative + allowed.absolute

    def differences(second):
        finite = np.isfinite(first) & np.isfinite(second)
        return [
            abs(one - other) if small or both else 0.0
            for one, other, small, both in zip(first, second, magnitude < allowed.overflow, finite, strict=True)
        ]

    def wrong(found):
        return [place for place, value in enumerate(found) if np.isnan(value) or value > bounds[place]]

    found = differences(second)
    places = wrong(found)
    worst = max(places, key=lambda place: INF if np.isnan(found[place]) else found[place], default=0)
    missing = bool(places) and not wrong(differences(second - own))
    facts = {"mismatches": len(places), "index": worst, "missing": missing}
    facts |= {"first": first[worst], "second": second[worst], "bound": bounds[worst]}
    return facts | {"share": max(value / bound if value > 0 else 0.0 for value, bound in zip(found, bounds, strict=True))}


@pytest.mark.parametrize("reference", [BOTH, COLUMNS_FIRST])
@pytest.mark.parametrize(("dtype", "allowed"), [("float32", ALLOWED), ("float32", NOTHING), ("bfloat16", ALLOWED)])
def test_findings_of_a_comparison_are_those_of_numpy(dtype, allowed, reference):
    """The numbers are exact in bfloat16, but not their sums; the sum that a device gets may be padded."""
    names, mesh = list(COMPARISONS), make_mesh(1, 3)
    each = np.array([COMPARISONS[name][0] for name in names], np.float64)
    with np.errstate(invalid="ignore"):
        first = each.sum(1) + [COMPARISONS[name][1] for name in names]
    if dtype == "bfloat16":
        first = np.asarray(jnp.asarray(first, dtype), np.float64)

    def per_device(each, first):
        found = []
        for contribution, total in zip(each[0], first, strict=True):
            padded = jnp.pad(total, (0, 2), constant_values=99).astype(dtype)
            bucket = SimpleNamespace(contribution=contribution.astype(dtype), gathered=lambda padded=padded: padded)
            found.append(compare_sums(bucket, reference, allowed))
        return jax.tree.map(lambda *values: jnp.stack(values)[None], *found)

    specs = {"in_specs": (PartitionSpec(AXES), PartitionSpec()), "out_specs": PartitionSpec(AXES), "check_vma": False}
    arguments = each.swapaxes(0, 1).astype(np.float32), first.astype(np.float32)
    found = jax.device_get(jax.jit(jax.shard_map(per_device, mesh=mesh, **specs))(*arguments))
    assert {name: value.dtype.name for name, value in found.items()} == {
        **dict.fromkeys(("share", "first", "second", "bound"), "float32"),
        **{"mismatches": "int32", "index": "int32", "missing": "bool"},
    }
    for device in range(3):
        for case, name in enumerate(names):
            ours = {key: value[device, case] for key, value in found.items()}
            with np.errstate(invalid="ignore", divide="ignore"):
                expected = expected_findings(each[case], first[case], each[case][device], allowed)
            assert ours == pytest.approx(expected, rel=1e-6, nan_ok=True), f"{name}, device {device}"
