"""Requests that fail for a while are repeated, and the interruption is reported once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxdp.cli import main
from jaxdp.cloud import retry
from jaxdp.cloud import source as remote
from jaxdp.cloud.location import ObjectNotFoundError, storage_errors
from jaxdp.cloud.retry import Patience, open_patiently
from jaxdp.errors import EXIT_CONFIG, EXIT_FAILURE, ConfigError, StorageError


@pytest.fixture
def short(monkeypatch):
    for name, seconds in {"FIRST_PAUSE": 0.01, "LONGEST_PAUSE": 0.02, "QUIET_SECONDS": 0.05}.items():
        monkeypatch.setattr(retry, name, seconds)


def test_an_interruption_is_reported_once_by_all_threads(short):
    end, lines = time.monotonic() + 0.3, []
    retry = Patience(60, lines.append)

    def request():
        if time.monotonic() < end:
            raise StorageError("no answer", "s3://bucket/a")
        return threading.get_ident()

    with ThreadPoolExecutor(8) as pool:
        assert len([future.result() for future in [pool.submit(retry, request) for _ in range(8)]]) == 8
    assert lines[0] == "waiting for object storage: s3://bucket/a: no answer; retrying"
    assert [line.startswith("object storage answers again, after 0 s") for line in lines] == [False, True]


def test_short_failures_are_not_reported(short):
    failures, lines = iter([StorageError("busy", "a")] * 2), []

    def request():
        for error in failures:
            raise error
        return 5

    assert Patience(60, lines.append)(request) == 5
    assert lines == []


def test_permanent_failures_and_those_that_last_too_long_are_raised(short):
    calls = []

    def missing():
        calls.append(1)
        raise ObjectNotFoundError("s3://bucket/a")

    def refused():
        calls.append(1)
        raise StorageError("no answer", "s3://bucket/a")

    with pytest.raises(ObjectNotFoundError):
        Patience(60, lambda text: None)(missing)
    assert len(calls) == 1
    with pytest.raises(StorageError, match="no answer"):
        Patience(0.1, lambda text: None)(refused)
    assert len(calls) > 3


class Failing:
    """A file system that fails every other two requests, as with an empty 503."""

    def __init__(self, fs):
        self.fs, self.failures, self.protocol = fs, 0, fs.protocol

    def __getattr__(self, name):
        def request(*args, **options):
            self.failures += 1
            if self.failures % 3:
                raise OSError(16, "Service Unavailable")
            return getattr(self.fs, name)(*args, **options)

        return request


@pytest.mark.parametrize(
    ("method", "arguments", "expected"),
    [
        ("read", ["a"], b"content"),
        ("read_intact", ["a"], b"content"),
        ("read_range", ["a", 1, 3], b"on"),
        ("write", ["b", b"1"], None),
        ("create", ["b", b"1"], True),
        ("upload", ["LOCAL", "b"], None),
        ("download", ["a", "LOCAL"], None),
        ("sizes", [], {"a": 7}),
        ("top_sizes", [], {"a": 7}),
        ("remove", [["a", "missing"]], None),
    ],
)
def test_every_request_of_a_run_is_repeated(short, tmp_path, method, arguments, expected):
    lines, local = [], tmp_path / "local"
    local.write_bytes(b"")
    place = open_patiently(f"memory://{tmp_path}", "--workdir", notice=lines.append)
    place.write("a", b"content")
    object.__setattr__(place, "fs", Failing(place.fs))
    assert getattr(place, method)(*[local if argument == "LOCAL" else argument for argument in arguments]) == expected
    assert place.fs.failures >= 3


@pytest.mark.parametrize(("permanent", "kind", "code"), [(True, ConfigError, EXIT_CONFIG), (False, StorageError, EXIT_FAILURE)])
def test_only_what_no_repetition_can_change_ends_with_code_2(permanent, kind, code):
    with (
        pytest.raises(kind, match=r"s3://bucket/run/config.json: busy") as error,
        storage_errors("s3://bucket/run", "--workdir"),
    ):
        raise StorageError("busy", "s3://bucket/run/config.json", permanent=permanent)
    assert error.value.exit_code == code


@pytest.mark.parametrize("command", ["train", "train on data", "evaluate", "report"])
@pytest.mark.parametrize(
    ("error", "code"), [(OSError(16, "Service Unavailable"), EXIT_FAILURE), (PermissionError(13, "Forbidden"), EXIT_CONFIG)]
)
def test_a_command_ends_with_code_2_only_if_the_same_command_fails_again(command, error, code, tmp_path, monkeypatch, capsys):
    """torchrun, `launch --restarts` and the Slurm script repeat code 1."""

    def fail(*args, **options):
        raise error

    for name in ("cat_file", "find", "ls", "info"):
        monkeypatch.setattr(MemoryFileSystem, name, fail)
    for module in (retry, remote):
        monkeypatch.setattr(module, "START_SECONDS", 0.0)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    url, output = f"memory:/{tmp_path}", str(tmp_path / "output")
    data = ["train", "--workdir", output, "--data.source", "folder", "--data.directory", url, "--model.depth", "18"]
    arguments = {
        "train": ["train", "--workdir", url],
        "train on data": data,
        "evaluate": ["evaluate", "--workdir", url],
        "report": ["report", url, "--no-html"],
    }[command]
    with pytest.raises(SystemExit) as stop:
        main.main([*arguments, *(["--storage.directory", output] if arguments[0] == "train" else [])])
    line = capsys.readouterr().err.splitlines()[-1]
    assert error.strerror in line
    assert url in line
    assert stop.value.code == code
