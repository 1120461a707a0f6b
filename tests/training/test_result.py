"""The result of a run: each field from what the run has counted."""

import dataclasses
import importlib
import platform
from types import SimpleNamespace

import pytest

from jaxdp.checkpoint.progress import Progress
from jaxdp.training.ending import collect_result, progress_now
from jaxdp.training.result import TrainResult, versions

PROGRESS = Progress(
    **{"samples": 96, "steps": 12, "training_seconds": 8.0, "evaluation_seconds": 2.0, "input_seconds": 0.25},
    **{"saving_seconds": 0.5, "compilation_seconds": 3.0, "audit_seconds": 0.125, "first_step_seconds": 4.0},
    **{"skipped_steps": 5, "audits": 6, "sessions": 7},
)
EVALUATION = {"eval_accuracy": 0.75, "eval_top5": 0.875, "eval_loss": 0.5, "eval_examples": 37, "samples": 64, "epoch": 1.25}


class Plan:
    """Three phases of 64 samples each, on one, two and four devices."""

    total_samples = 192
    phases = tuple(SimpleNamespace(first_sample=64 * index, devices=2**index, shape=(1, 2**index)) for index in range(3))

    def phase_before(self, samples):
        return self.phases[(samples - 1) // 64]


class Group:
    """Four processes on two hosts; another process could not read an image either."""

    num_processes, host_numbers = 4, [0, 1, 0, 1]

    def __init__(self, report):
        self.report = report

    def all_gather_object(self, name, value, *, while_waiting):
        while_waiting()
        return [value, {"b.png": "truncated"}]

    def straggler_report(self, *, whole_run):
        return self.report if whole_run else {}


def run(*, samples=96, patience=None, report=None):
    return SimpleNamespace(
        processes=Group(report or {}),
        plan=Plan(),
        progress=dataclasses.replace(PROGRESS, samples=samples),
        clock=SimpleNamespace(wall_seconds=20.0),
        datasets=SimpleNamespace(bad_images={"a.png": "empty"}),
        compiler=SimpleNamespace(shown_strategy=lambda phase: "none" if phase.devices == 1 else "torus"),
        config=SimpleNamespace(task="classes", stop=SimpleNamespace(patience=patience)),
        checkpoints=SimpleNamespace(last_error="No space left on device"),
        **{"epoch": 1.5, "devices": [SimpleNamespace(device_kind="cpu")], "location": "s3://bucket/run"},
        stop_reason="it is good enough",
    )


SHARED = {
    **{
        "metrics": {"accuracy": 0.75, "top5": 0.875},
        "loss": 0.5,
        "eval_examples": 37,
        "steps": 12,
        "samples": 96,
        "epochs": 1.5,
    },
    **{"wall_seconds": 20.0, "seconds_to_first_step": 4.0, "training_seconds": 8.0, "evaluation_seconds": 2.0},
    **{"images_per_second": 12.0, "devices": 2, "device_kind": "cpu", "mesh": (1, 2), "versions": versions()},
    **{"workdir": "s3://bucket/run", "skipped_steps": 5, "strategy": "none, torus", "input_seconds": 0.25},
    **{"saving_seconds": 0.5, "compilation_seconds": 3.0, "audit_seconds": 0.125, "audits": 6, "sessions": 7},
    **{"bad_images": {"a.png": "empty", "b.png": "truncated"}, "processes": 4, "hosts": 2, "waiting_share": 0.0},
    **{"slowest": [], "save_error": "No space left on device", "best_samples": None, "best_epoch": None},
    **{"stopped_early": True, "stop_reason": "it is good enough"},
}
FINISHED = {"samples": 192, "images_per_second": 24.0, "devices": 4, "mesh": (1, 4)}


@pytest.mark.parametrize(
    ("options", "without", "changed"),
    [
        ({}, (), {}),
        ({"patience": 0}, (), {"best_samples": 64, "best_epoch": 1.25}),
        ({"report": {"waiting_share": 0.5, "slowest": [{"rank": 3}]}}, (), {"waiting_share": 0.5, "slowest": [{"rank": 3}]}),
        ({"samples": 191}, (), FINISHED | {"samples": 191, "images_per_second": 23.875}),
        (
            {"samples": 192},
            ("eval_top5",),
            FINISHED | {"metrics": {"accuracy": 0.75, "top5": None}, "stopped_early": False, "stop_reason": None},
        ),
    ],
    ids=["stopped", "early stopping", "stragglers", "stopped before its last image", "finished"],
)
def test_each_field_is_what_the_run_has_counted(options, without, changed):
    evaluation = {name: value for name, value in EVALUATION.items() if name not in without}
    assert dataclasses.asdict(collect_result(run(**options), evaluation)) == SHARED | changed


def test_a_result_of_the_required_fields_alone_describes_a_run_without_incidents_of_one_process():
    required = [field.name for field in dataclasses.fields(TrainResult) if field.default is field.default_factory]
    result = dataclasses.asdict(TrainResult(**{name: SHARED[name] for name in required}))
    assert {name: value for name, value in result.items() if name not in required and value} == dict.fromkeys(
        ("sessions", "processes", "hosts"), 1
    )
    assert not result["stopped_early"]
    assert repr(TrainResult(**SHARED)) == (
        "TrainResult(accuracy=0.7500, loss=0.5000, epochs=1.50, steps=12, wall_seconds=20.0, workdir='s3://bucket/run', ...)"
    )


def test_the_present_progress_has_the_times_and_bad_images_up_to_now():
    expected = dataclasses.replace(PROGRESS, wall_seconds=20.0, bad_images={"a.png": "empty"})
    assert progress_now(run()) == expected


def test_versions_are_those_of_the_installed_packages():
    found = dict(versions())
    assert found.pop("python") == platform.python_version()
    assert found == {
        name: importlib.import_module(name.replace("-", ".")).__version__
        for name in ("jaxdp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    }
