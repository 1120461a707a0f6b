import shlex
import subprocess
import sys

import pytest

from jaxdp.loggers.origin import command_line, describe_origin, git_commit


def test_the_origin_has_what_is_known(monkeypatch):
    assert sys.orig_argv[0] in describe_origin()["command"]
    monkeypatch.setattr("jaxdp.loggers.origin.git_commit", lambda: None)
    assert describe_origin().keys() == {"host", "command"}


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
