"""Reduce-scatter: exact sums over several CPU processes, the same bits and bytes as XLA's own."""

import dataclasses
import importlib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from helpers.strategies import set_stages
from jax import lax
from jax.sharding import PartitionSpec

import jaxdp
from jaxdp import models
from jaxdp.config import Reduce
from jaxdp.errors import ConfigError
from jaxdp.parallel import allreduce, reduce_scatter, traffic
from jaxdp.parallel.mesh import AXES, HORIZONTAL, VERTICAL, make_mesh
from jaxdp.strategies import STRATEGIES
from jaxdp.training.step_compiler import mesh_of, trace_train_step

ROWS = PartitionSpec(AXES)
MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]


@pytest.fixture
def gloo(monkeypatch):
    """Let JAX appear distributed; only for tracing, because no program of this process can run over gloo."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)


def traced(stages, mesh_shape=(2, 4), dtype=jnp.float32):
    """The jaxpr of `stages` (a strategy's name or a function) on a vector whose size no mesh divides."""
    mesh = make_mesh(*mesh_shape)
    total = partial(allreduce.all_reduce_sum, strategy=stages, bucket_bytes=None)
    check_vma = allreduce.check_vma(stages)
    mapped = jax.shard_map(total, mesh=mesh, in_specs=ROWS, out_specs=PartitionSpec(), check_vma=check_vma)
    return jax.jit(mapped).trace([jax.ShapeDtypeStruct((8 * 1001,), dtype)]).jaxpr


def scatter_stage(vector):
    """A custom stage that calls psum_scatter directly."""
    padded = jnp.pad(vector, (0, -vector.size % 4))
    return lax.psum_scatter(padded, HORIZONTAL, scatter_dimension=0, tiled=True)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_strategy_over_gloo_does_not_use_psum_scatter(strategy, gloo):
    assert "reduce_scatter" not in traffic.primitives(traced(strategy))


def test_train_step_over_gloo_uses_all_to_all(gloo, tiny_resnet):
    phase = jaxdp.plan(tiny_resnet, devices=4).phases[0]
    step = trace_train_step(tiny_resnet, models.create(tiny_resnet.model), phase, mesh=mesh_of(phase))
    assert "reduce_scatter" not in traffic.primitives(step.jaxpr)
    assert "all_to_all" in traffic.primitives(step.jaxpr)


def test_reduce_scatter_single_process_or_gpu_uses_psum_scatter(monkeypatch):
    assert "reduce_scatter" in traffic.primitives(traced("torus"))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert reduce_scatter.uses_gloo("cpu")
    assert not reduce_scatter.uses_gloo("cuda")
    assert not reduce_scatter.uses_gloo("gpu")


@pytest.mark.parametrize("mesh_shape", MESHES)
def test_all_to_all_sum_sends_same_bytes_as_psum_scatter(mesh_shape, monkeypatch):
    sizes = dict(zip(AXES, mesh_shape, strict=True))
    scattered = traffic.find_collectives(traced("torus", mesh_shape, jnp.bfloat16), sizes)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    exchanged = traffic.find_collectives(traced("torus", mesh_shape, jnp.bfloat16), sizes)
    assert [(one.axes, one.dtype, one.sent_bytes) for one in scattered] == [
        (one.axes, one.dtype, one.sent_bytes) for one in exchanged
    ]


@pytest.mark.parametrize(
    ("mesh_shape", "dtype"), [*((shape, "float32") for shape in MESHES), ((2, 4), "float16"), ((2, 4), "bfloat16")]
)
def test_reduce_scatter_both_forms_return_sums_of_numpy(mesh_shape, dtype):
    vertical, horizontal = mesh_shape
    values = np.random.default_rng(0).integers(-15, 16, (8, 8 * 37))  # 16-bit formats hold all sums of eight
    given = jnp.asarray(values.reshape(-1), dtype)
    mesh = make_mesh(*mesh_shape)
    expected = values.reshape(vertical, horizontal, -1).sum(1).reshape(-1)
    for form in (reduce_scatter.psum_scatter, reduce_scatter.all_to_all_sum):
        out = jax.jit(jax.shard_map(form, mesh=mesh, in_specs=ROWS, out_specs=ROWS))(given)
        assert out.dtype == given.dtype
        np.testing.assert_array_equal(np.asarray(out, np.float64), expected)


@pytest.mark.parametrize("form", [reduce_scatter.all_to_all_sum, reduce_scatter.tiled_psum_scatter])
@pytest.mark.parametrize("size", [4 * 3, 4 * 2048, 4 * 2500])
def test_reduce_scatter_other_forms_return_the_bits_of_psum_scatter(form, size):
    given = np.random.default_rng(0).normal(size=8 * size).astype(np.float32)
    mesh = make_mesh(2, 4)
    out = [
        np.asarray(jax.jit(jax.shard_map(one, mesh=mesh, in_specs=ROWS, out_specs=ROWS))(given))
        for one in (reduce_scatter.psum_scatter, form)
    ]
    np.testing.assert_array_equal(*out)


@pytest.mark.parametrize("strategy", [name for name, one in STRATEGIES.items() if one.scatters])
def test_messages_of_tpus_consist_of_whole_tiles_and_return_the_same_sums(strategy, monkeypatch):
    given = np.random.default_rng(0).normal(size=8 * 1001).astype(np.float32)
    mapped = partial(jax.shard_map, mesh=make_mesh(2, 4), in_specs=ROWS, out_specs=PartitionSpec())
    total = partial(allreduce.all_reduce_sum, strategy=strategy)
    plain = jax.jit(mapped(total))(given)
    monkeypatch.setattr(reduce_scatter, "on_tpu", lambda: True)
    monkeypatch.setattr(allreduce, "on_tpu", lambda: True)
    np.testing.assert_array_equal(plain, jax.jit(mapped(total))(given))
    sent = [
        one for one in traffic.find_collectives(traced(strategy), {VERTICAL: 2, HORIZONTAL: 4}) if one.axes == (HORIZONTAL,)
    ]
    assert {one.operation for one in sent} == {"reduce-scatter", "all-gather"}
    assert all(one.operand_bytes % (4 * 2048) == 0 for one in sent)


def test_custom_psum_scatter_over_gloo_with_inexact_jaxlib_raises_config_error(gloo, tiny_resnet, tmp_path, monkeypatch):
    gathered = partial(lax.all_gather, axis_name=HORIZONTAL, tiled=True, to="invarying")
    stages = scatter_stage, lambda vector: lax.psum(vector, VERTICAL), gathered
    set_stages(monkeypatch, "mine", *stages)
    names = traffic.primitives(traced("mine"))
    for version in ("0.10.2", "0.11.2", "0.12.0"):
        monkeypatch.setattr(jaxlib, "__version__", version)
        assert "lax.psum_scatter returns wrong sums" in reduce_scatter.inexact_collective_reason(names, "cpu")
        assert reduce_scatter.inexact_collective_reason(names, "cuda") is None
    monkeypatch.setattr(jaxlib, "__version__", str(reduce_scatter.EXACT_OVER_GLOO))
    assert reduce_scatter.inexact_collective_reason(names, "cpu") is None

    monkeypatch.setattr(jaxlib, "__version__", "0.10.2")
    config = dataclasses.replace(tiny_resnet, reduce=Reduce(strategy="mine"))
    with pytest.raises(ConfigError, match=r"^reduce.strategy='mine': lax.psum_scatter returns wrong sums.*"):
        jaxdp.train(config, tmp_path / "run")


@pytest.mark.slow
def test_strategies_four_processes_return_exact_sums(monkeypatch):
    """Wrong sums of gloo's reduce-scatter were found from 512 KiB on: benchmarks/collectives.py has more sizes and layouts."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    session = importlib.import_module("collectives").session
    calls, wrong = dict.fromkeys(STRATEGIES, 0), dict.fromkeys(STRATEGIES, 0)
    for row in session("2x2", list(STRATEGIES), [65_536, 2_097_152], 12):
        calls[row["form"]] += row["calls"]
        wrong[row["form"]] += row["wrong"]
    assert wrong == dict.fromkeys(STRATEGIES, 0)
    assert min(calls.values()) >= 48
