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


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
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


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--reduce.no-overlap", "--compile.no-tuned"]])
def test_messages_travel_beside_the_backward_pass_of_a_block(flags):
    """In XLA's schedule for 4 hosts of 8 each of ResNet-18's ten messages does; without overlap XLA makes fewer of them."""
    command = [sys.executable, "-m", "jaxdp", "plan", "--config", "imagenet_mlperf_3264", "--json", *TINY, *flags]
    command += ["--batch.0.global-batch", "128", "--batch.0.per-worker-batch", "4", "--reduce.wire-dtype", "bfloat16"]
    command += ["--reduce.strategy", "psum", "--compile-for", "h200", "--hosts", "4", "--gpus-per-host", "8"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}).stdout
    (gradients,) = (one for one in json.loads(out)["compiled"]["collectives"] if one["dtype"] == "bf16")
    if flags:
        assert gradients["count"] < 10
    else:
        assert gradients["count"] == gradients["asynchronous"] == gradients["beside_something"] == 10
        assert gradients["kernels_beside"] > 10 * 10
