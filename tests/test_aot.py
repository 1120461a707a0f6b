"""Compilation for GPUs that are not there, where XLA's compiler for them is installed (extra cuda13)."""

import json
import os
import subprocess
import sys

import pytest

from jaxdp import aot
from jaxdp.config import ConfigError
from jaxdp.parallel.chips import CHIPS
from jaxdp.planning import make_plan
from jaxdp.recipes import load_config

needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
TINY = ["--model.depth", "18", "--model.width", "16", "--data.image-size", "64", "--data.augmentation", "none"]
TINY += ["--data.stored-size", "None"]


def plan(devices=8):
    return make_plan(load_config("imagenet_goyal_256", ["--batch.0.global-batch", "256"]), 1_281_167, devices)


def test_an_unknown_chip_and_an_unknown_phase_are_errors():
    with pytest.raises(ConfigError, match="--compile-for: 'tpu' is not allowed; give a100, h100, h200"):
        aot.compile_for(plan(), 0, "tpu", 1, 8)
    with pytest.raises(ConfigError, match="--phase: 3 is not allowed; the plan has 0"):
        aot.compile_for(plan(), 3, "h200", 1, 8)


def test_a_missing_compiler_is_an_error_that_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--compile-for: 'h200' is not allowed; XLA's GPU compiler .* extra cuda13"):
        aot.compile_for(plan(), 0, "h200", 1, 8)


def test_groups_are_told_apart_by_axis():
    assert aot.axis_of(((0, 1, 2), (3, 4, 5)), 2, 3) == "horizontal"
    assert aot.axis_of(((0, 3), (1, 4), (2, 5)), 2, 3) == "vertical"
    assert aot.axis_of((tuple(range(6)),), 2, 3) == "vertical x horizontal"
    assert aot.axis_of(((0, 1), (1, 2), (2, 0)), 2, 3) == "point to point"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "strategy"), [("a100", "torus"), ("h100", "torus"), ("h200", "torus"), ("h200", "psum"), ("h200", "hierarchical")]
)
def test_a_step_compiles_for_a_cluster_of_gpus(chip, strategy):
    """4 hosts of 8: every collective lies along the axis and has the bytes that the account of the trace says."""
    command = [sys.executable, "-m", "jaxdp", "plan", "--config", "imagenet_mlperf_3264", "--json", "--wire", *TINY]
    command += ["--batch.0.global-batch", "128", "--batch.0.per-worker-batch", "4", "--reduce.wire-dtype", "bfloat16"]
    command += ["--reduce.strategy", strategy, "--compile-for", chip, "--hosts", "4", "--gpus-per-host", "8"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    told = json.loads(out)
    compiled, (account,) = told["compiled"], told["wire"]
    assert compiled["chip"] == CHIPS[chip].name
    assert compiled["mesh"] == [4, 8]
    assert 0 < compiled["memory_bytes"] < compiled["device_memory_bytes"]
    assert compiled["kernels"] > 100
    wanted, found = {}, {}
    for one in account["collectives"]:
        key = one["operation"], " x ".join(one["axes"]), one["group"]
        wanted[key] = wanted.get(key, 0) + one["operand_bytes"] * one["count"]
    for one in compiled["collectives"]:
        key = one["operation"], one["axis"], one["group"]
        found[key] = found.get(key, 0) + one["operand_bytes"]
    assert found == wanted
    assert any("bf16" in one["dtype"] for one in compiled["collectives"])


def gradient_messages(strategy, *flags):
    """The collectives of ResNet-18's gradients, bfloat16, as XLA schedules them for 4 hosts of 8: by operation."""
    command = [sys.executable, "-m", "jaxdp", "plan", "--config", "imagenet_mlperf_3264", "--json", *TINY, *flags]
    command += ["--batch.0.global-batch", "128", "--batch.0.per-worker-batch", "4", "--reduce.wire-dtype", "bfloat16"]
    command += ["--reduce.strategy", strategy, "--compile-for", "h200", "--hosts", "4", "--gpus-per-host", "8"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}).stdout
    return {one["operation"]: one for one in json.loads(out)["compiled"]["collectives"] if one["dtype"] == "bf16"}


@needs_compiler
@pytest.mark.slow
def test_messages_travel_beside_the_backward_pass_of_a_block():
    """Each of ResNet-18's ten messages does."""
    (gradients,) = gradient_messages("psum").values()
    assert gradients["count"] == gradients["asynchronous"] == gradients["beside_something"] == 10
    assert gradients["kernels_beside"] > 10 * 10


@needs_compiler
@pytest.mark.slow
def test_without_overlap_xla_makes_fewer_messages():
    (gradients,) = gradient_messages("psum", "--reduce.no-overlap", "--compile.no-tuned").values()
    assert gradients["count"] < 10


@needs_compiler
@pytest.mark.slow
def test_the_toruss_messages_between_hosts_travel_beside_the_backward_pass():
    """And so do all that gather inside a host; XLA waits for most that are scattered there, NVLink being fast."""
    found = gradient_messages("torus")
    assert [found[name]["count"] for name in ("reduce-scatter", "all-reduce", "all-gather")] == [10, 10, 10]
    assert found["all-reduce"]["asynchronous"] == found["all-gather"]["asynchronous"] == 10
    assert found["all-reduce"]["beside_something"] >= 9
    assert found["all-reduce"]["covered_bytes"] > 0.9 * found["all-reduce"]["operand_bytes"]
    assert found["all-gather"]["beside_something"] >= 9
    assert found["reduce-scatter"]["beside_something"] >= 3
