"""Runs sent by the real clients: W&B offline, read back by `wandb leet inspect`; an MLflow server, read through REST."""

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from helpers.processes import CACHE_EVERYTHING, ROOT, TIMEOUT, TINY
from helpers.runs import Recorder, train_shown, train_until
from helpers.step import with_parts
from helpers.tracked import MlflowServer, log_points, untimed, wandb_points, wandb_records

from jaxdp.checkpoint.listing import latest_valid
from jaxdp.distributed.launch import reserved_port
from jaxdp.loggers import tracker
from jaxdp.loggers.mlflow_logger import MlflowLogger
from jaxdp.loggers.origin import git_commit
from jaxdp.loggers.tracker import NO_POSITION, Record
from jaxdp.run_records import read_log
from jaxdp.validation import flatten

pytestmark = pytest.mark.slow
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the extra wandb")
needs_mlflow = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("sqlalchemy") is None,
    reason="needs the extra mlflow, and the package mlflow for its server",
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracker, "STOP_SECONDS", 60.0)  # a slow machine
    monkeypatch.setattr(tracker, "END_SECONDS", 120.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"), reserved_port())
    server.start()
    yield server
    server.signal(signal.SIGKILL)
    server.process.wait()


def tracked(config, **targets):
    return with_parts(config, checkpoint={"every_epochs": 1}, logging=targets)


def values_of(entries) -> dict:
    return {entry["key"]: entry["value"] for entry in entries}


@needs_wandb
def test_wandb_offline_holds_an_interrupted_run_once(tiny, tmp_path, plots):
    config = tracked(tiny, wandb="digits", send_checkpoint=True)
    train_until(config, tmp_path, step=10)
    result = train_shown(config, tmp_path, screen=Recorder())
    assert untimed(wandb_points(tmp_path)) == untimed(log_points(tmp_path))

    records = wandb_records(tmp_path)
    fields, summary = {}, {}
    for record in records:
        fields |= record.get("config", {}).get("update", {})
        summary |= record.get("summary", {}).get("update", {})
    expected = {name: list(v) if isinstance(v, tuple) else v for name, v in flatten(dataclasses.asdict(config)).items()}
    assert {name: fields[name] for name in expected} == expected
    assert summary["result/accuracy"] == pytest.approx(result.accuracy)
    assert sys.orig_argv[0] in summary["command"]
    assert summary.get("commit", "") == (git_commit() or "")
    assert [record["artifact"]["type"] for record in records if record["type"] == "artifact"] == ["checkpoint"]
    assert summary["checkpoint"] == str(latest_valid(tmp_path / "checkpoints").path)
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [1, 0]
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    files = [row[f"{name}.path"] for row in rows for name in ("examples/held_out", "training") if f"{name}.path" in row]
    evaluations = [record for record in read_log(tmp_path / "metrics.jsonl") if "eval_accuracy" in record]
    assert len(files) == len(evaluations) + 1
    assert all(any((tmp_path / "wandb").glob(f"offline-run-*/files/{file}")) for file in files)
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    assert {(metric.get("glob_name"), metric.get("step_metric")) for metric in metrics} >= {("*", "samples")}


@needs_mlflow
def test_mlflow_holds_a_run_during_which_its_server_was_suspended(tiny, server, tmp_path, plots, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")  # so that requests fail meanwhile

    class Suspending(Recorder):
        def step(self, record):
            if record["step"] == 4:
                server.signal(signal.SIGSTOP)
                threading.Timer(8.0, server.signal, [signal.SIGCONT]).start()

    config, recorder = tracked(tiny, mlflow=server.uri, send_checkpoint=True), Suspending()
    result = train_shown(config, tmp_path, screen=recorder)
    assert untimed(server.points(tmp_path)) == untimed(log_points(tmp_path))
    (run,) = server.runs(tmp_path)
    assert run["info"]["status"] == "FINISHED"
    params, tags, metrics = (values_of(run["data"][kind]) for kind in ("params", "tags", "metrics"))
    assert params.keys() == flatten(dataclasses.asdict(config)).keys()
    assert (params["batch.0.global_batch"], params["schedule.learning_rate"]) == ("8", "2.0")
    assert tags["checkpoint"] == str(latest_valid(tmp_path / "checkpoints").path)
    assert metrics["result/accuracy"] == pytest.approx(result.accuracy)
    assert sys.orig_argv[0] in tags["command"]
    assert tags.get("commit", "") == (git_commit() or "")
    identity = run["info"]["run_id"]

    def files(**query):
        return {file["path"] for file in server.get("mlflow/artifacts/list", run_id=identity, **query)["files"]}

    assert files() == {"result.json", "training.png", "held_out", "checkpoint"}
    evaluated = {r["samples"] for r in read_log(tmp_path / "metrics.jsonl") if "eval_accuracy" in r}
    assert files(path="held_out") == {f"held_out/held_out-{samples}.png" for samples in evaluated}


@needs_mlflow
def test_long_texts_and_nan_are_sent_to_mlflow(server, tmp_path):
    long, logger = "x" * 7000, MlflowLogger(server.uri)
    logger.workdir, logger.run_name, logger.about = tmp_path, "long", {"command": long}
    logger.config, logger.state = {"data.directory": long}, logger._read_state()
    assert logger.open() == NO_POSITION
    logger.send([Record({"samples": 8 * n, "loss": None if n % 3 else 1.0, "wall_seconds": n / 7}) for n in range(1, 1500)])
    assert logger.open() == 3 * 8 * 1499
    assert len(server.points(tmp_path)) == 3 * 1499
    (run,) = server.runs(tmp_path)
    assert values_of(run["data"]["params"])["data.directory"] == f"{long[:5999]}…"


PATIENT = """
import runpy, sys
from jaxdp.loggers import tracker
tracker.END_SECONDS = 600.0
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@needs_mlflow
@needs_wandb
def test_killed_and_resumed_run_is_in_both_trackers_once(server, tmp_path):
    """MLflow has all. W&B's files lack only what the client had not written at the kill."""
    log = tmp_path / "metrics.jsonl"
    flags = ["--workdir", str(tmp_path), *TINY, "--epochs", "12", "--mesh.cpu-devices", "2", "--checkpoint.every-epochs", "2"]
    flags += ["--logging.wandb", "kills", "--logging.mlflow", server.uri]
    command = [sys.executable, "-c", f"import sys; sys.argv[:1] = ['train.py']{PATIENT}", *flags]

    # A service that another test of this process has started would keep the killed run, and refuse the same id.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"} | CACHE_EVERYTHING

    def start():
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    process, deadline = start(), time.monotonic() + TIMEOUT
    while not log.exists() or log.read_bytes().count(b"\n") < 10:  # the newest checkpoint has fewer
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = read_log(log)[-1]["samples"]
    with start() as resumed:
        assert resumed.wait(4 * TIMEOUT) == 0
    expected = untimed(log_points(tmp_path))
    assert untimed(server.points(tmp_path)) == expected
    assert [run["info"]["status"] for run in server.runs(tmp_path)] == ["FINISHED"]
    lost = Counter(expected) - Counter(found := untimed(wandb_points(tmp_path)))
    assert len(found) + lost.total() == len(expected)  # nothing twice
    assert all(samples <= last + 200 for samples, *_ in lost)  # trackers get a record just before the log
