"""The probe of JAX in a subprocess."""

import dataclasses
import sys
import threading

import pytest

from jaxdp.config import Config, Phase
from jaxdp.doctor import jax_probe
from jaxdp.recipes import load_config
from jaxdp.validation import to_json


def test_probe_in_this_process_reports_devices_and_bytes(tiny):
    probe = jax_probe._probe_devices(to_json(tiny))
    assert probe.start_problem is None
    assert [device["platform"] for device in probe.devices] == ["cpu"] * 4
    assert probe.state_bytes > 0
    assert probe.input_bytes > 0
    assert jax_probe.Probe.from_json(probe.to_json()) == probe


def test_probe_of_a_batch_above_the_data_set_reports_a_plan_problem(tiny):
    probe = jax_probe._probe_devices(to_json(dataclasses.replace(tiny, batch=(Phase(global_batch=2000),))))
    assert probe.plan_problem.field.startswith("batch.0.global_batch")
    assert probe.state_bytes > 0
    assert probe.input_bytes is None
    assert jax_probe.Probe.from_json(probe.to_json()) == probe


def test_probe_that_crashes_reports_that_jax_does_not_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    probe = jax_probe.probe(Config())
    assert probe.start_problem.message == "JAX does not start: python failed with exit code 1: no output"
    assert probe.devices == []


def test_probe_that_cannot_be_killed_is_abandoned(monkeypatch):
    until = threading.Event()
    monkeypatch.setattr(jax_probe, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(jax_probe, "probe", lambda *_: until.wait())
    probe = jax_probe.probe_with_deadline(Config(), 0.1)
    until.set()
    assert probe.start_problem.message == "JAX does not start: no answer in 0.1 s, and the process cannot be killed"
    assert probe.devices == []


@pytest.mark.slow
def test_probe_in_a_subprocess_reports_devices_and_bytes():
    probe = jax_probe.probe(load_config("digits", ["--model.depth", "18"]))
    assert probe.start_problem is None
    assert [device["platform"] for device in probe.devices] == ["cpu"] * 4
    assert probe.state_bytes > 2 * 4 * 11_181_642  # parameters and velocity of ResNet-18 with ten classes
    assert probe.input_bytes > 0
