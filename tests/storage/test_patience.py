"""Requests that fail for a while are repeated, and the interruption is reported once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxdp.storage import patience
from jaxdp.storage.location import ObjectNotFoundError, StorageError
from jaxdp.storage.patience import Patience


@pytest.fixture
def short(monkeypatch):
    for name, seconds in {"FIRST_PAUSE": 0.01, "LONGEST_PAUSE": 0.02, "QUIET_SECONDS": 0.05}.items():
        monkeypatch.setattr(patience, name, seconds)


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
