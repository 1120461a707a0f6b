"""Tests of jaxdp.trackers.run_files."""

import json
import math
import shlex
import subprocess
import sys
import threading

import pytest

from jaxdp.trackers import run_files
from jaxdp.trackers.run_files import (
    LAST,
    TrackerState,
    command_line,
    exclusive,
    git_commit,
    next_records,
    picture_path,
    pictures,
    position,
    read_origin,
    run_facts,
    values,
    write_origin,
)
from jaxdp.validation import to_json

STEP = {"samples": 64, "step": 8, "loss": 0.5, "gradient_norm": None}
EVALUATION = {"samples": 64, "step": 8, "eval_accuracy": 0.75}


def test_positions_are_in_the_order_of_the_log():
    assert position(STEP) < position(EVALUATION) < 3 * STEP["samples"] + LAST < position(STEP | {"samples": 65})


def test_values_are_grouped_numbers_and_null_is_nan():
    of_step = values(STEP | {"note": "x"})
    assert math.isnan(of_step.pop("training/gradient_norm"))
    assert of_step == {"training/samples": 64, "training/step": 8, "training/loss": 0.5}
    assert values(EVALUATION) == {"evaluation/samples": 64, "evaluation/step": 8, "evaluation/accuracy": 0.75}


def line(samples, **fields):
    return json.dumps({"samples": samples} | fields) + "\n"


def read_all(log):
    records = []
    while new := next_records(log):
        records += new
    return [record["samples"] for record in records]


def test_a_log_that_grows_is_read_in_complete_lines_and_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "LINES", 7)
    path = tmp_path / "log"
    path.write_text("".join(line(n, note="é" * n) for n in range(1, 50)) + line(50)[:5])
    with open(path, "rb") as log:
        assert len(next_records(log)) == 7
        assert read_all(log) == list(range(8, 50))
        with open(path, "a") as file:
            file.write(line(50)[5:] + line(51))
        assert read_all(log) == [50, 51]


def test_damaged_lines_are_left_out(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\0\0{\n[1]\n" + line(8).encode() + b'{"samples": "x"}\n\xff\xfe\n' + line(16, loss=None).encode())
    with open(path, "rb") as log:
        assert read_all(log) == [8, 16]


def test_identity_is_kept_for_a_target(tmp_path):
    identity = TrackerState(tmp_path, "wandb", "digits").identify()
    again = TrackerState(tmp_path, "wandb", "digits")
    assert (again.exists, again.identify()) == (True, identity)
    other = TrackerState(tmp_path, "wandb", "flowers")
    assert not other.exists
    assert other.identify() != identity


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"id": 5, "target": "digits"}', '{"target": "digits"}', "\0"])
def test_damaged_state_is_replaced(tmp_path, damaged):
    state = TrackerState(tmp_path, "wandb", "digits")
    state.identify()
    state.path.write_text(damaged)
    assert not TrackerState(tmp_path, "wandb", "digits").exists
    identity = TrackerState(tmp_path, "wandb", "digits").identify()
    assert TrackerState(tmp_path, "wandb", "digits").identify() == identity


def test_two_processes_do_not_send_to_one_tracker_at_once(tmp_path):
    (tmp_path / "trackers").mkdir()
    order = []

    def second():
        with exclusive(tmp_path, "wandb"):
            order.append("second")

    thread = threading.Thread(target=second)
    with exclusive(tmp_path, "wandb"), exclusive(tmp_path, "mlflow"):
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(120)
    assert order == ["first", "second"]


def test_run_facts_of_a_run_without_checkpoint_and_result(tiny, tmp_path):
    (tmp_path / "config.json").write_text(to_json(tiny))
    for samples in (1024, 64):
        picture_path(tmp_path, samples).parent.mkdir(exist_ok=True)
        picture_path(tmp_path, samples).touch()
    (tmp_path / "trackers/held_out-x.png").touch()
    assert list(pictures(tmp_path)) == [64, 1024]
    facts = run_facts(tmp_path, "s3://bucket/run")
    assert (facts.name, facts.about, facts.plot, facts.result) == ("tiny", {"directory": "s3://bucket/run"}, None, {})
    assert facts.config["batch.0.global_batch"] == 8


@pytest.mark.parametrize("damaged", ["", "[]", "\0"])
def test_the_origin_of_a_run_is_stored(tmp_path, damaged):
    assert read_origin(tmp_path) == {}
    write_origin(tmp_path)
    origin = read_origin(tmp_path)
    assert (origin["commit"], sys.orig_argv[0] in origin["command"]) == (git_commit() or "", True)
    (tmp_path / "trackers/origin.json").write_text(damaged)
    assert read_origin(tmp_path) == {}


def test_a_command_is_stored_without_its_secrets():
    command = [
        "python",
        "train.py",
        "--api-key",
        "hidden1",
        "--token=hidden2",
        "--url",
        "https://me:hidden3@host/a",
        "--epochs",
        "5",
    ]
    shown = command_line(command)
    assert "hidden" not in shown
    assert shown == "python train.py --api-key ... --token=... --url https://...@host/a --epochs 5"


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("Authorization: Bearer hidden", "Authorization:..."),
        ("--header=X-Api-Key hidden", "--header=X-Api-Key ..."),
        ('{"a": 1, "token": "hidden"}', '{"a": 1, "token":...'),
        ("https://host/?a=1&token=hidden", "https://host/?a=1&token=..."),
        ("/home/author/runs/tokens", "/home/author/runs/tokens"),
    ],
)
def test_what_follows_the_name_of_a_secret_inside_a_word_is_not_stored(word, shown):
    assert shlex.split(command_line(["tool", word, "end"])) == ["tool", shown, "end"]


def test_the_commit_is_that_of_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    (tmp_path / "file").write_text("1")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    commit = git_commit()
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert git_commit() == f"{commit}+changes"
