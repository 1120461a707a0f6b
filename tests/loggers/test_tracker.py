"""Tests of jaxdp.loggers.tracker: runs whose tracker is a file, hangs, or is down."""

import dataclasses
import json
import math
import sys
from types import SimpleNamespace

import pytest
from helpers.fake_tracker import FakeTracker, received, stored
from helpers.runs import Recorder, train_shown, train_until, without_timing
from helpers.step import with_parts

from jaxdp import ConfigError
from jaxdp.checkpoint.listing import latest_valid, read_manifests
from jaxdp.cloud.local import run_copy
from jaxdp.distributed.signal_handler import ForcedStop
from jaxdp.loggers import tracker
from jaxdp.loggers.tracker import Record
from jaxdp.run_records import read_log
from jaxdp.validation import flatten

STEP = {"samples": 64, "step": 8, "loss": 0.5, "gradient_norm": None, "note": "x"}
EVALUATION = {"samples": 64, "step": 8, "eval_accuracy": 0.75}


@pytest.fixture
def with_tracker(tiny, monkeypatch):
    """with_tracker(target): `tiny` with the tracker of helpers.fake_tracker in place of MLflow; pauses are short."""
    monkeypatch.setattr("jaxdp.session.assembly.MlflowLogger", FakeTracker)
    monkeypatch.setattr("jaxdp.session.preparation.check_packages", lambda config: None)
    monkeypatch.setattr(tracker, "SHORTEST_PAUSE", 0.01)
    monkeypatch.setattr(tracker, "STOP_SECONDS", 60.0)
    monkeypatch.setattr(tracker, "END_SECONDS", 60.0)
    return lambda target: with_parts(tiny, logging={"mlflow": f"http://{target}"}, checkpoint={"every_epochs": 1})


def untimed(records):
    return [without_timing(record) for record in records]


def about_tracker(recorder):
    return [line for line in recorder.lines if line.startswith("json: ")]


def test_records_are_numbered_in_the_order_of_the_log_and_their_numbers_grouped():
    assert Record(STEP).position < Record(EVALUATION).position < Record(STEP | {"samples": 65}).position
    of_step = Record(STEP).numbers
    assert math.isnan(of_step.pop("training/gradient_norm"))
    assert of_step == {"training/samples": 64, "training/step": 8, "training/loss": 0.5}
    assert Record({"samples": 64, "\ud800": 1}).numbers == {"training/samples": 64, "training/\\ud800": 1}
    assert Record(EVALUATION).numbers == {"evaluation/samples": 64, "evaluation/step": 8, "evaluation/accuracy": 0.75}


def test_tracker_receives_the_log_config_pictures_checkpoint_and_result(with_tracker, tmp_path):
    config, recorder = with_tracker("works"), Recorder()
    result = train_shown(config, tmp_path, screen=recorder)
    log = read_log(tmp_path / "metrics.jsonl")
    assert received(tmp_path) == log
    (opened,) = stored(tmp_path, "open")
    expected = flatten(dataclasses.asdict(config))
    assert opened.items() >= {name: list(v) if isinstance(v, tuple) else v for name, v in expected.items()}.items()
    assert (sys.orig_argv[0] in opened["command"], opened["directory"], opened["name"]) == (True, str(tmp_path), "tiny")
    assert len(stored(tmp_path, "picture")) == sum("eval_accuracy" in record for record in log)
    (ending,) = stored(tmp_path, "ending")
    assert ending["checkpoint"] == str(latest_valid(tmp_path / "checkpoints").path)
    assert (ending["accuracy"], ending["best"]) == (result.accuracy, None)
    assert about_tracker(recorder) == ["json: a file"]
    train_shown(with_parts(config, logging={"mlflow": "http://x"}), tmp_path, screen=recorder)  # the finished run again
    assert stored(tmp_path, "outcome") == ["finished"]
    assert any(line.startswith("these changes have no effect on the finished run: logging.mlflow: ") for line in recorder.lines)


def test_interrupted_run_continues_the_same_run_of_the_tracker(with_tracker, tmp_path):
    config = with_tracker("works")
    train_until(config, tmp_path, step=10)
    before, identity = len(received(tmp_path)), (tmp_path / "trackers/json.json").read_text()
    train_shown(config, tmp_path, screen=Recorder())
    assert before > 7  # more than the checkpoint has, from which the run continues
    assert untimed(received(tmp_path)) == untimed(read_log(tmp_path / "metrics.jsonl"))
    assert stored(tmp_path, "outcome") == ["failed", "finished"]
    assert (tmp_path / "trackers/json.json").read_text() == identity


def test_tracker_that_hangs_costs_the_end_of_its_run_and_a_resumed_run_sends_what_is_missing(
    with_tracker, tmp_path, monkeypatch
):
    monkeypatch.setattr(tracker, "STOP_SECONDS", 0.3)
    lines = about_tracker(train_until(with_tracker("hangs"), tmp_path, step=10))
    assert lines == ["json: the end of the run was not sent, with at most 12 lines of the log"]
    (tmp_path / "trackers/json.json").write_text(json.dumps({"id": "a", "target": "http://works"}))
    train_shown(with_tracker("works"), tmp_path, screen=Recorder())
    assert untimed(received(tmp_path)) == untimed(read_log(tmp_path / "metrics.jsonl"))


def test_tracker_that_fails_in_the_middle_of_a_request_gets_every_record_once(with_tracker, tmp_path):
    recorder = Recorder()
    train_shown(with_tracker("fails-in-the-middle"), tmp_path, screen=recorder)
    assert received(tmp_path) == read_log(tmp_path / "metrics.jsonl")
    failed = "json: no connection (OSError: broken pipe); training continues, and it is tried again"
    assert about_tracker(recorder) == ["json: a file", *[failed, "json: a file"] * 3]


def test_tracker_that_is_down_is_reported_once_without_the_password_in_its_url(with_tracker, tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "END_SECONDS", 0.3)
    recorder, log = Recorder(), tmp_path / "metrics.jsonl"
    train_shown(with_tracker("is-down"), tmp_path, screen=recorder)
    assert about_tracker(recorder) == [
        "json: no connection (OSError: no route to http://...@host); training continues, and it is tried again",
        f"json: the end of the run was not sent, with at most {len(read_log(log)) + 1} lines of the log",
    ]


def test_tracker_that_cannot_start_costs_itself(with_tracker, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeTracker, "name", "absent")
    recorder = Recorder()
    assert train_shown(with_tracker("works"), tmp_path, screen=recorder).steps
    reason = "ModuleNotFoundError: No module named 'absent'"
    assert f"absent.on_start raised {reason}; the run continues without it" in recorder.lines


def test_tracker_is_not_waited_for_after_a_forced_stop():
    one = FakeTracker("http://hangs")
    one.on_end(SimpleNamespace(error=ForcedStop()), None)
    assert one._queue.empty()


def test_tracker_of_a_run_at_a_url_has_the_url_of_the_run_and_its_newest_and_best_checkpoint(with_tracker, tmp_path):
    config, url = with_tracker("works"), (tmp_path / "bucket/run").as_uri()
    config = with_parts(config, storage={"directory": str(tmp_path / "machine")}, logging={"send_checkpoint": True})
    result = train_shown(config, url, screen=Recorder())
    copy = run_copy(config.storage, url)
    best = max(
        read_manifests(copy / "checkpoints"), key=lambda manifest: (manifest.evaluation["eval_accuracy"], manifest.samples)
    )
    (ending,) = stored(copy, "ending")
    assert ending["best"] == str(best.path)
    assert (ending["workdir"], ending["checkpoint"]) == (url, f"{url}/checkpoints/{result.samples}")


@pytest.mark.parametrize("damaged", ["{", "[]", '{"id": 5, "target": "http://works"}', '{"id": "x", "target": "other"}', "\0"])
def test_damaged_state_or_another_target_gets_a_new_id(tmp_path, damaged):
    one = FakeTracker("http://works")
    one.workdir, path = tmp_path, tmp_path / "trackers/json.json"
    path.parent.mkdir()
    path.write_text(damaged)
    state = one._read_state()
    assert (state["target"], len(state["id"]), one._read_state()) == ("http://works", 8, state)


def test_missing_package_is_one_error_before_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"^logging.wandb='digits': the package wandb is not installed; pip install "):
        train_shown(with_parts(tiny, logging={"wandb": "digits"}), tmp_path, screen=Recorder())
    assert not list(tmp_path.iterdir())
