"""Ahead-of-time compilation for GPUs and TPUs; needs XLA's compilers for them (extras cuda13 and tpu)."""

import json
import os
import subprocess
import sys
from functools import partial

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import jaxdp
from jaxdp.analysis import aot
from jaxdp.analysis.gpu_targets import GPU_TARGETS
from jaxdp.analysis.tpu_targets import ACCELERATORS, SLICES, TPU_TARGETS, sides_of
from jaxdp.errors import ConfigError
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import make_plan
from jaxdp.recipes import load_config
from jaxdp.xla.kernels import kernels_of_step
from jaxdp.xla.options import without_compilation_cache

needs_compiler = pytest.mark.skipif(aot.unavailable_reason() is not None, reason=str(aot.unavailable_reason()))
needs_libtpu = pytest.mark.skipif(aot.unavailable_reason("tpu") is not None, reason=str(aot.unavailable_reason("tpu")))
PERMUTE = "collective-permute"
TINY = ["--model.depth", "18", "--model.width", "16", "--data.image-size", "64", "--data.augmentation", "none"]
TINY += ["--data.stored-size", "None"]
MULTIPLY_ADDS = 11_187_200  # of an image


def plan(devices=8):
    return make_plan(load_config("imagenet_goyal_256", ["--batch.0.global-batch", "256"]), examples=1_281_167, devices=devices)


def test_compile_for_unknown_gpu_or_phase_raises_config_error(monkeypatch):
    monkeypatch.setattr(aot, "unavailable_reason", lambda platform: None)
    with pytest.raises(ConfigError, match="--compile-for='tpu'"):
        aot.compile_for(plan(), 0, target="tpu", hosts=1, gpus_per_host=8)
    with pytest.raises(ConfigError, match="--phase=3: the plan has phases 0"):
        aot.compile_for(plan(), 3, target="h200", hosts=1, gpus_per_host=8)


def test_compile_for_without_compiler_raises_config_error_with_extra(monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--compile-for='h200': .*extra cuda13"):
        aot.compile_for(plan(), 0, target="h200", hosts=1, gpus_per_host=8)
    with pytest.raises(ConfigError, match=r"--compile-for='v5e:2x4': .*extra tpu: pip install -e '\.\[tpu\]'"):
        aot.compile_for(plan(), 0, target="v5e:2x4")


def test_a_compiler_that_does_not_start_raises_config_error(monkeypatch):
    def fails(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: Failed to open libtpu.so\nin full")

    monkeypatch.setattr(topologies, "get_topology_desc", fails)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    with pytest.raises(ConfigError, match=r"--compile-for='v5e:2x4': INTERNAL: Failed to open libtpu\.so; install the extra"):
        aot.devices_of("v5e:2x4")
    assert "TPU_SKIP_MDS_QUERY" not in os.environ


def test_slices_are_named_by_chip_and_sides():
    assert sides_of("v5p:2x4x4") == (2, 4, 4)
    assert sides_of("v5p") == sides_of("h200") == sides_of(None) == ()
    assert {
        accelerator: name for accelerator, name in ACCELERATORS.items() if name in ("v5e:2x4", "v5p:2x2x1", "v6e:16x16")
    } == {
        "v5litepod-8": "v5e:2x4",
        "v5p-8": "v5p:2x2x1",
        "v6e-256": "v6e:16x16",
    }
    assert len(ACCELERATORS) == len(SLICES)


def test_unknown_slice_lists_the_slices_of_its_chip():
    with pytest.raises(ConfigError, match=r"--compile-for='v6e:3x3'.* v6e:2x4,.* v6e:16x16$"):
        aot.check_target("v6e:3x3")
    with pytest.raises(ConfigError, match=r"h200, v5e:1x1,.* v6e:16x16$"):
        aot.check_target("v4-8")


def test_axis_of_device_groups_returns_mesh_axis():
    assert aot.axis_of(((0, 1, 2), (3, 4, 5)), 2, 3) == "horizontal"
    assert aot.axis_of(((0, 3), (1, 4), (2, 5)), 2, 3) == "vertical"
    assert aot.axis_of((tuple(range(6)),), 2, 3) == "vertical x horizontal"
    assert aot.axis_of(((0, 1), (1, 2), (2, 0)), 2, 3) == "point to point"


def gradient_messages(strategy):
    """The collectives of ResNet-18's gradients, which are bfloat16, as XLA schedules them for 4 hosts of 8 GPUs: by operation.

    All collectives of the compiled step send the bytes of the trace, by operation and axis. XLA describes permutations as pairs
    of devices, so their bytes are compared by operation.
    """
    command = [sys.executable, "-m", "jaxdp", "plan", "--config", "imagenet_mlperf_3264", "--json", "--wire", *TINY]
    command += ["--batch.0.global-batch", "128", "--batch.0.per-worker-batch", "4", "--reduce.wire-dtype", "bfloat16"]
    command += ["--reduce.strategy", strategy, "--compile-for", "h200", "--hosts", "4", "--gpus-per-host", "8"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    record = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    compiled, (account,) = record["compiled"], record["wire"]
    assert compiled["device"] == GPU_TARGETS["h200"].name
    assert compiled["mesh"] == [4, 8]
    assert 0 < compiled["memory_bytes"] < compiled["device_memory_bytes"]
    assert compiled["kernels"] > 100
    expected, found = {}, {}
    for one in account["collectives"]:
        key = one["operation"], *(() if one["operation"] == PERMUTE else (" x ".join(one["axes"]), one["group"]))
        expected[key] = expected.get(key, 0) + one["operand_bytes"] * one["count"]
    for one in compiled["collectives"]:
        key = one["operation"], *(() if one["operation"] == PERMUTE else (one["axis"], one["group"]))
        found[key] = found.get(key, 0) + one["operand_bytes"]
    assert found == expected
    return {one["operation"]: one for one in compiled["collectives"] if one["dtype"] == "bf16"}


@needs_compiler
@pytest.mark.slow
def test_compiled_psum_sends_the_bytes_of_the_trace_and_overlaps_with_the_backward_pass():
    """All ten messages of ResNet-18."""
    (gradients,) = gradient_messages("psum").values()
    assert gradients["count"] == gradients["asynchronous"] == gradients["overlapped"] == 10
    assert gradients["overlapped_kernels"] > 10 * 10


@needs_compiler
@pytest.mark.slow
def test_compiled_torus_sends_the_bytes_of_the_trace_and_overlaps_between_hosts_with_the_backward_pass():
    """The all-gathers inside a host too; XLA waits for most reduce-scatters there, because NVLink is fast."""
    found = gradient_messages("torus")
    assert [found[name]["count"] for name in ("reduce-scatter", "all-reduce", "all-gather")] == [10, 10, 10]
    assert found["all-reduce"]["asynchronous"] == found["all-gather"]["asynchronous"] == 10
    assert found["all-reduce"]["overlapped"] >= 9
    assert found["all-reduce"]["covered_bytes"] > 0.9 * found["all-reduce"]["operand_bytes"]
    assert found["all-gather"]["overlapped"] >= 9
    assert found["reduce-scatter"]["overlapped"] >= 3


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "hierarchical", "parameter_server"])
def test_compiled_strategy_sends_the_bytes_of_the_trace(strategy):
    gradient_messages(strategy)


@needs_compiler
@pytest.mark.slow
def test_compiled_step_makes_blocks_of_bfloat16_pixels_in_one_kernel(monkeypatch):
    """They are read by the first convolution and by the gradient of its weights, and by no copy."""
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    flags = ["--model.depth", "18", "--model.width", "16", "--model.dtype", "bfloat16", "--reduce.strategy", "psum"]
    config = load_config("imagenet_goyal_256", [*flags, "--batch.0.global-batch", "8", "--batch.0.per-worker-batch", "8"])
    made = make_plan(config, examples=1_281_167, devices=1)
    step = aot.compile_for(made, 0, target="h100")
    found = [one for one in kernels_of_step(step.text, 8) if one.side > 112]
    assert [(one.side, one.kind) for one in found] == [(224, "forward"), (113, "convolution"), (113, "weight gradient")]
    assert found[0].bytes == pytest.approx(8 * (224 * 224 * 3 + 2 * 113 * 113 * 16), rel=1e-3)


def compiled_for_a_slice(*flags, batch=128):
    """The plan of ResNet-18 for small images, with its step compiled for 2x4 chips."""
    command = [sys.executable, "-m", "jaxdp", "plan", "--config", "imagenet_mlperf_3264", "--json", *TINY, *flags]
    command += ["--batch.0.global-batch", str(batch), "--batch.0.per-worker-batch", "16", "--reduce.strategy", "torus"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([*command, "--compile-for", "v5litepod-8"], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    plan = json.loads(ran.stdout)
    hops = "at most 1 hop apart in a column and 3 hops apart in a row"
    assert plan["layouts"] == [f"mesh 2x4 on a 2x4x1 slice of TPU v5 lite, along its axes: neighbors are {hops}"]
    compiled = plan["compiled"]
    assert (compiled["device"], compiled["target"], compiled["mesh"]) == ("TPU v5e", "v5e:2x4", [2, 4])
    assert 0 < compiled["memory_bytes"] < compiled["device_memory_bytes"] == 15.75 * 2**30
    return compiled


@needs_libtpu
@pytest.mark.slow
def test_step_compiled_for_a_tpu_slice_reduces_along_its_axes_in_its_memory():
    """The torus of ResNet-18. XLA keeps the reduce-scatters, and overlaps all-gathers with the backward pass."""
    compiled = compiled_for_a_slice()
    found = {(one["operation"], one["axis"]): one for one in compiled["collectives"]}
    assert {("reduce-scatter", "horizontal"), ("all-reduce", "vertical"), ("all-gather", "horizontal")} <= found.keys()
    scattered, gathered = found["reduce-scatter", "horizontal"], found["all-gather", "horizontal"]
    assert scattered["operand_bytes"] == pytest.approx(4 * gathered["operand_bytes"], rel=0.05)  # both padded to tiles
    assert gathered["overlapped"] > 0
    assert compiled["least_compute_seconds"] == compiled["flop"] / TPU_TARGETS["v5e"].flops
    assert compiled["flop"] == pytest.approx(16 * 6 * MULTIPLY_ADDS, rel=0.25)  # in three passes


@needs_libtpu
@pytest.mark.slow
def test_evaluation_step_compiled_for_a_tpu_slice_sums_over_all_chips():
    compiled = compiled_for_a_slice("--step", "evaluation")
    assert compiled["step"] == "evaluation"
    assert {(one["operation"], one["axis"]) for one in compiled["collectives"]} == {("all-reduce", "vertical x horizontal")}
    assert sum(one["operand_bytes"] for one in compiled["collectives"]) < 100
    assert compiled["flop"] == pytest.approx(16 * 2 * MULTIPLY_ADDS, rel=0.25)


@needs_libtpu
@pytest.mark.slow
def test_flop_of_a_step_compiled_for_a_tpu_slice_are_those_of_all_micro_batches():
    assert compiled_for_a_slice(batch=256)["flop"] == pytest.approx(32 * 6 * MULTIPLY_ADDS, rel=0.25)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("v5e:2x2", (1, 3)), ("v5p:2x2x2", (2, 3)), ("v5p:2x4x4", (2, 8)), ("v6e:2x4", (3, 2))]
)
def test_torus_compiles_for_parts_of_a_tpu_slice_and_for_odd_rows(name, shape):
    mesh = make_mesh(*shape, aot.devices_of(name))
    average = partial(jaxdp.all_reduce_mean, strategy="torus")
    reduction = jax.shard_map(average, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    vector = jax.ShapeDtypeStruct((30_000,), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    lowered = jax.jit(reduction).trace(vector).lower(lowering_platforms=("tpu",))
    with without_compilation_cache():
        text = lowered.compile().as_text()
    assert ("all-to-all" in text) == (shape[1] % 2 == 1)
