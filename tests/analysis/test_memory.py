"""Estimated memory of a plan, and the warning for a GPU that cannot hold it."""

from functools import cache

import pytest

from jaxdp.analysis import memory
from jaxdp.analysis.gpu_targets import GPU_TARGETS
from jaxdp.errors import ConfigError
from jaxdp.models.activation_memory import activation_bytes
from jaxdp.planning import make_plan
from jaxdp.recipes import load_config
from jaxdp.sizes import input_bytes, model_summary

SMALL = ["--model.depth", "18", "--model.width", "8", "--data.image-size", "64", "--data.augmentation", "none"]


@cache
def planned(per_worker=64):
    """A plan of 256 images a step on four devices, with its estimate."""
    flags = ["--batch.0.global-batch", "256", "--batch.0.per-worker-batch", str(per_worker)]
    plan = make_plan(load_config("imagenet_goyal_256", [*SMALL, *flags]), examples=5000, devices=4)
    return plan, memory.estimate(plan, model_summary(plan.config))


def test_estimate_adds_state_input_and_activations_of_a_micro_batch():
    plan, needed = planned(32)
    summary = model_summary(plan.config)
    assert plan.phases[0].accumulation == 2
    assert needed["activations"] == 32 * activation_bytes(plan.config.model, (64, 64, 3))
    assert needed["state"] == sum(summary["state_bytes"].values()) + 4 * summary["parameters"]  # two sums of gradients
    assert needed["input"] == input_bytes(plan)["device"]
    assert needed["total"] == needed["activations"] + needed["state"] + needed["input"]


def test_warning_names_a_batch_that_fits(monkeypatch):
    monkeypatch.delenv(memory.FRACTION_VARIABLE, raising=False)
    plan, needed = planned()
    assert memory.warning(plan, needed, limit=needed["total"], device="a GPU") is None
    text = memory.warning(plan, needed, limit=needed["total"] - 1, device="a GPU")
    assert text.startswith("warning: a GPU cannot hold this run")
    assert "--batch.0.per-worker-batch 32" in text
    assert "--model.remat" in text
    assert 2 * planned(32)[1]["activations"] == needed["activations"]
    third = memory.warning(*planned(), limit=needed["total"] - needed["activations"] // 3, device="a GPU")
    assert "--batch.0.per-worker-batch 32" in third  # 42 would fit, but 4 devices divide 256 images of 32 only
    hopeless = memory.warning(plan, needed, limit=1, device="a GPU")
    assert hopeless.endswith("; use more devices or a larger GPU")


def test_usable_bytes_is_the_share_that_jax_takes(monkeypatch):
    monkeypatch.delenv(memory.FRACTION_VARIABLE, raising=False)
    assert memory.usable_bytes("l4") == 18 * 2**30
    monkeypatch.setenv(memory.FRACTION_VARIABLE, "0.5")
    assert memory.usable_bytes("l4") == 12 * 2**30
    with pytest.raises(ConfigError, match="--gpu='h10'"):
        memory.usable_bytes("h10")


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_sold_memory_is_close_to_what_xla_states(name):
    """XLA's descriptions of GPUs give the bytes that the driver reports."""
    assert memory.GPU_MEMORY[name] * memory.GIB == pytest.approx(GPU_TARGETS[name].memory_bytes, rel=0.02)
