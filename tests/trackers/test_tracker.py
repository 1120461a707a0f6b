"""Tests of jaxdp.trackers.tracker: runs whose tracker is a file, hangs, crashes or is down."""

import dataclasses
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.fake_tracker import CLIENT, received, stored
from helpers.runs import Recorder, train_shown, train_until, without_timing
from helpers.step import with_parts

from jaxdp import ConfigError
from jaxdp.checkpoint.listing import latest_valid, read_manifests
from jaxdp.cloud.local import run_copy
from jaxdp.cloud.remote_run import download_checkpoint
from jaxdp.distributed.signal_handler import ForcedStop
from jaxdp.run_records import read_events, read_log
from jaxdp.trackers import tracker
from jaxdp.trackers.run_files import TrackerState, exclusive, read_origin
from jaxdp.trackers.tracker import Tracker, Trackers, trackers_of
from jaxdp.validation import flatten


@pytest.fixture
def with_tracker(tiny, monkeypatch):
    """with_tracker(target): `tiny` with the tracker of helpers.fake_tracker in place of MLflow; waits are short."""
    monkeypatch.setitem(tracker.CLIENTS, "mlflow", CLIENT)
    monkeypatch.setattr("jaxdp.session.preparation.check_packages", lambda config: None)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(tracker, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(tracker, "STOP_SECONDS", 20.0)

    def config(target):
        return with_parts(tiny, logging={"mlflow": f"http://{target}"})

    return config


def untimed(records):
    return [without_timing(record) for record in records]


def about_tracker(recorder):
    return [line for line in recorder.lines if "mlflow" in line]


def trackers(target, **options):
    return Trackers([Tracker("mlflow", f"http://{target}")], **options)


def test_tracker_receives_the_log_config_pictures_checkpoint_and_result(with_tracker, tmp_path):
    config, recorder = with_tracker("works"), Recorder()
    result = train_shown(config, tmp_path, screen=recorder)
    there, log = tmp_path / "tracker.jsonl", read_log(tmp_path / "metrics.jsonl")
    assert received(there) == log
    (fields,) = stored(there, "config")
    expected = flatten(dataclasses.asdict(config))
    assert fields == {name: list(v) if isinstance(v, tuple) else v for name, v in expected.items()}
    evaluated = [record["samples"] for record in log if "eval_accuracy" in record]
    assert stored(there, "picture") == [f"held_out-{samples}.png" for samples in evaluated]
    (about,) = stored(there, "about")
    assert about["checkpoint"] == str(latest_valid(tmp_path / "checkpoints").path)
    assert sys.orig_argv[0] in about["command"]
    assert stored(there, "best") == [None]
    assert stored(there, "result")[0]["accuracy"] == result.accuracy
    assert about_tracker(recorder) == ["mlflow: a file"]
    train_shown(config, tmp_path, screen=recorder)  # the finished run again: nothing is left to send
    assert (stored(there, "outcome"), len(received(there))) == (["finished"], len(log))
    train_shown(with_parts(config, logging={"send_checkpoint": True}), tmp_path, screen=recorder)
    assert "these changes have no effect on the finished run: logging.send_checkpoint: False -> True" in recorder.lines


def test_interrupted_run_continues_the_same_run_of_the_tracker(with_tracker, tmp_path):
    config, there = with_tracker("works"), tmp_path / "tracker.jsonl"
    config = with_parts(config, checkpoint={"every_epochs": 1})
    train_until(config, tmp_path, step=10)
    lost = len(received(there))
    train_shown(config, tmp_path, screen=Recorder())
    log = read_log(tmp_path / "metrics.jsonl")
    assert lost > 7
    assert untimed(received(there)) == untimed(log)
    assert stored(there, "outcome") == ["failed", "finished"]


def test_tracker_that_hangs_changes_nothing_and_the_same_command_sends_everything_later(
    with_tracker, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(tracker, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(tracker, "END_SECONDS", 0.6)
    recorder, workdir = Recorder(), tmp_path / "with"
    train_shown(with_tracker("hangs"), workdir, screen=recorder)
    train_shown(tiny, tmp_path / "without", screen=Recorder())
    log = read_log(workdir / "metrics.jsonl")
    assert untimed(log) == untimed(read_log(tmp_path / "without/metrics.jsonl"))
    arrays = [latest_valid(tmp_path / name / "checkpoints").arrays for name in ("with", "without")]
    assert arrays[0] == arrays[1]
    origin = read_origin(workdir)
    first, *_, last = about_tracker(recorder)
    assert first == "mlflow: no answer within 0.5 s; training continues"
    assert last == "mlflow: not everything has arrived; the same command sends the rest"
    monkeypatch.setattr(tracker, "CONNECT_SECONDS", 20.0)
    monkeypatch.setattr(tracker, "END_SECONDS", 20.0)
    monkeypatch.setattr("jaxdp.trackers.run_files.git_commit", lambda: "later")
    recorder = Recorder()
    train_shown(with_tracker("works"), workdir, screen=recorder)
    assert received(workdir / "tracker.jsonl") == log
    (about,) = stored(workdir / "tracker.jsonl", "about")
    assert {name: about.get(name, "") for name in origin} == origin
    assert about_tracker(recorder)[-1] == "mlflow: everything has arrived"


def test_tracker_that_rejects_a_new_run_is_one_error_before_training(with_tracker, tmp_path):
    with pytest.raises(ConfigError) as error:
        train_shown(with_tracker("rejects"), tmp_path, screen=Recorder())
    assert str(error.value) == "logging.mlflow='http://rejects': it is not known; use another"
    assert not (tmp_path / "checkpoints").exists()


def test_each_tracker_that_fails_a_resumed_run_is_one_line_and_all_are_waited_for_together(with_tracker, tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "CONNECT_SECONDS", 20.0)
    lines = {
        "is-down": "is-down: no connection (no route); training continues",
        "rejects": "logging.rejects='http://rejects': it is not known; use another; training continues without it",
        "crashes": f"crashes: its process has ended (exit code 3, see {tmp_path}/trackers/crashes.log); training continues "
        "without it",
    }
    for target in lines:
        monkeypatch.setitem(tracker.CLIENTS, target, CLIENT)
        TrackerState(tmp_path, target, f"http://{target}").identify()
    (tmp_path / "config.json").write_text('{"name": "tiny"}')
    recorder, started = Recorder(), []
    three = Trackers([Tracker(target, f"http://{target}") for target in lines], end_seconds=0.6)
    show = {"info": recorder.info, "while_waiting": lambda: started.append([one.is_running for one in three.trackers])}
    three.start(tmp_path, str(tmp_path), **show)
    assert started[0] == [True] * 3
    assert sorted(recorder.lines) == sorted(lines.values())
    three.finish("finished")
    assert recorder.lines[3] == "waiting at most 0.6 s for is-down to receive the last points; Ctrl-C skips this"
    assert sorted(recorder.lines[4:]) == [
        f"{one}: not everything has arrived; the same command sends the rest" for one in sorted(lines)
    ]
    assert not any(one.is_running for one in three.trackers)


def test_tracker_of_a_run_at_a_url_has_the_url_of_the_run_and_its_newest_and_best_checkpoint(with_tracker, tmp_path):
    config, url = with_tracker("works"), (tmp_path / "bucket/run").as_uri()
    config = with_parts(config, storage={"directory": str(tmp_path / "machine")}, logging={"send_checkpoint": True})
    result = train_shown(config, url, screen=Recorder())
    copy, events = run_copy(config.storage, url), read_events(tmp_path / "bucket/run/events.jsonl")
    there, manifests = copy / "tracker.jsonl", list(read_manifests(copy / "checkpoints"))
    best = max(manifests, key=lambda manifest: (manifest.accuracy, manifest.samples))
    assert stored(there, "best") == [str(best.path)]
    checkpoint = stored(there, "about")[0]["checkpoint"]
    assert checkpoint == f"{url}/checkpoints/{result.samples}"
    assert download_checkpoint(checkpoint, "--resume", tmp_path).samples == result.samples
    assert stored(there, "result")[0]["workdir"] == url
    assert "mlflow: a file" in [event["text"] for event in events]


def test_end_of_the_run_ends_the_process_of_the_tracker(with_tracker, tmp_path):
    """Without an outcome on its input, as after SIGKILL or a second signal, it sends the rest of the log."""
    (tmp_path / "config.json").write_text('{"name": "tiny"}')
    (tmp_path / "metrics.jsonl").write_text('{"samples": 8, "loss": 1.0}\n')
    one = trackers("works", end_seconds=0.6)
    one.start(tmp_path, str(tmp_path), info=print)
    process = one.trackers[0].process
    with pytest.raises(ForcedStop), one.ended():
        raise ForcedStop
    with exclusive(tmp_path, "mlflow"):
        pass
    assert process.wait(120) == 0
    assert received(tmp_path / "tracker.jsonl") == [{"samples": 8, "loss": 1.0}]
    assert stored(tmp_path / "tracker.jsonl", "outcome") == ["killed"]
    one.start(tmp_path, str(tmp_path), info=lambda text: None)
    process = one.trackers[0].process
    os.kill(process.pid, signal.SIGSTOP)  # such a process does not block the end
    one.finish("finished")
    assert process.returncode == -signal.SIGKILL


def test_what_cannot_be_written_or_drawn_costs_itself(tmp_path, monkeypatch):
    (tmp_path / "trackers").touch()
    one, lines = trackers("works"), []
    one.start(tmp_path, str(tmp_path), info=lines.append)
    one.finish("finished")
    assert lines[0].startswith("mlflow: its process cannot start ([Errno 17]")
    assert lines[0].endswith("; training continues without it")

    def example_grid(*arrays, class_names):
        raise ValueError("no font")

    monkeypatch.setattr(tracker, "example_grid", example_grid)
    run = SimpleNamespace(example_images=((),), datasets=SimpleNamespace(classes=()), info=lines.append)
    for _ in range(2):
        one.after_evaluation(run, {"samples": 8})
    assert lines[1:] == ["held-out images cannot be drawn for mlflow (ValueError: no font); training continues without them"]


def test_directory_whose_name_is_not_utf8_is_sent(with_tracker, tmp_path):
    workdir, lines = tmp_path / os.fsdecode(b"run-\xff"), []
    workdir.mkdir()
    (workdir / "config.json").write_text('{"name": "tiny"}')
    (workdir / "metrics.jsonl").write_text('{"samples": 8, "loss": 1.0}\n')
    one = trackers("is-in-the-directory")
    one.start(workdir, str(workdir), info=lines.append)
    one.finish("stopped")
    assert lines == [f"mlflow: {tmp_path}/run-\\udcff/tracker.jsonl"]
    assert stored(workdir / "tracker.jsonl", "about") == [{"directory": f"{tmp_path}/run-\\udcff"}]


def test_missing_package_is_one_error_before_the_run_and_wandb_may_be_disabled(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    config = with_parts(tiny, logging={"wandb": "digits"})
    assert trackers_of(config).trackers == []
    with pytest.raises(ConfigError, match=r"^logging.wandb='digits': the package wandb is not installed; pip install "):
        train_shown(config, tmp_path, screen=Recorder())
    assert not list(tmp_path.iterdir())
