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
    position,
    read_origin,
    run_facts,
    values,
    write_origin,
)
from jaxdp.validation import to_json

STEP = {"samples": 64, "step": 8, "loss": 0.5, "gradient_norm": None, "note": "x"}
EVALUATION = {"samples": 64, "step": 8, "eval_accuracy": 0.75}


def test_positions_are_in_the_order_of_the_log_and_values_are_grouped_numbers():
    assert position(STEP) < position(EVALUATION) < 3 * STEP["samples"] + LAST < position(STEP | {"samples": 65})
    of_step = values(STEP)
    assert math.isnan(of_step.pop("training/gradient_norm"))
    assert of_step == {"training/samples": 64, "training/step": 8, "training/loss": 0.5}
    assert values({"samples": 64, "\ud800": 1}) == {"training/samples": 64, "training/\\ud800": 1}  # what no client can send
    assert values(EVALUATION) == {"evaluation/samples": 64, "evaluation/step": 8, "evaluation/accuracy": 0.75}


def read_all(log):
    records = []
    while new := next_records(log):
        records += new
    return [record["samples"] for record in records]


def test_a_log_that_grows_is_read_in_complete_lines_and_in_parts_without_damaged_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "LINES", 7)
    lines = [(json.dumps({"samples": n, "note": "é" * n}, ensure_ascii=False) + "\n").encode() for n in range(1, 52)]
    path = tmp_path / "log"
    path.write_bytes(b'\0\0{\n[1]\n{"samples": "x"}\n\xff\xfe\n' + b"".join(lines[:49]) + lines[49][:5])
    with open(path, "rb") as log:
        assert len(next_records(log)) == 7
        assert read_all(log) == list(range(8, 50))
        with open(path, "ab") as file:
            file.write(lines[49][5:] + lines[50])
        assert read_all(log) == [50, 51]


def test_identity_is_kept_for_a_target(tmp_path):
    identity = TrackerState(tmp_path, "wandb", "digits").identify()
    again = TrackerState(tmp_path, "wandb", "digits")
    assert (again.exists, again.identify()) == (True, identity)
    other = TrackerState(tmp_path, "wandb", "flowers")
    assert not other.exists
    assert other.identify() != identity


@pytest.mark.parametrize("damaged", ["{", "[]", '{"id": 5, "target": "digits"}', "\0"])
def test_damaged_state_is_replaced(tmp_path, damaged):
    state = TrackerState(tmp_path, "wandb", "digits")
    state.path.parent.mkdir()
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
    facts = run_facts(tmp_path, "s3://bucket/run")
    assert (facts.name, facts.about, facts.plot, facts.result) == ("tiny", {"directory": "s3://bucket/run"}, None, {})
    assert facts.config["batch.0.global_batch"] == 8


def test_the_origin_of_a_run_is_stored(tmp_path):
    assert read_origin(tmp_path) == {}
    write_origin(tmp_path)
    origin = read_origin(tmp_path)
    assert (origin["commit"], sys.orig_argv[0] in origin["command"]) == (git_commit() or "", True)
    for damaged in ("[]", "\0"):
        (tmp_path / "trackers/origin.json").write_text(damaged)
        assert read_origin(tmp_path) == {}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api-key", "hidden"], ["--api-key", "..."]),
        (["--token=hidden"], ["--token=..."]),
        (["https://me:hidden@host/a"], ["https://...@host/a"]),
        (["Authorization: Bearer hidden"], ["Authorization:..."]),
        (["--header=X-Api-Key hidden"], ["--header=X-Api-Key ..."]),
        (['{"a": 1, "token": "hidden"}'], ['{"a": 1, "token":...']),
        (["https://host/?a=1&token=hidden"], ["https://host/?a=1&token=..."]),
        (["--hf-tokens", "hidden"], ["--hf-tokens", "..."]),
        (["--accessToken=hidden"], ["--accessToken=..."]),
        (["--oauth2", "hidden"], ["--oauth2", "..."]),
        (["--authorization", "hidden"], ["--authorization", "..."]),
        (["--key", "hidden"], ["--key", "..."]),
        (["--pw", "hidden"], ["--pw", "..."]),
        (["-pwd=hidden"], ["-pwd=..."]),
        (["--db.passphrase", "hidden"], ["--db.passphrase", "..."]),
        (["SSH_KEY=hidden"], ["SSH_KEY=..."]),
        (["AWSAccessKeyId=hidden"], ["AWSAccessKeyId=..."]),
        (["https://host/?X-Amz-Signature=hidden&a=1"], ["https://host/?X-Amz-Signature=..."]),
        (["https://host/?a=1&sig=hidden"], ["https://host/?a=1&sig=..."]),
    ],
)
def test_a_command_is_stored_without_its_secrets(words, shown):
    assert shlex.split(command_line(["tool", *words, "--epochs", "5"])) == ["tool", *shown, "--epochs", "5"]


@pytest.mark.parametrize(
    "words",
    [
        ["/home/author/runs/tokens"],
        ["--author", "Jane"],
        ["--co-authors=Jane"],
        ["--data.tokenizer", "x"],
        ["--data.tokenizer=x"],
        ["--keyboard", "x"],
        ["--monkey=x"],
        ["--sigma", "0.5"],
        ["--passes=2"],
        ["s3://bucket/key/pass/run"],
    ],
)
def test_a_command_is_stored_with_what_is_no_secret(words):
    assert shlex.split(command_line(["tool", *words, "--epochs", "5"])) == ["tool", *words, "--epochs", "5"]


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
