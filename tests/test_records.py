"""Tests of jaxdp.records."""

import os

import pytest

from jaxdp.records import read_log, to_json


def test_to_json_writes_numbers_that_are_not_finite_as_null():
    assert to_json({"a": float("nan"), "b": float("inf"), "c": 1.5, "d": 3}) == '{"a": null, "b": null, "c": 1.5, "d": 3}'


def test_sparse_log_that_claims_a_terabyte_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"samples": 1}\n')
    os.truncate(path, 2**40)
    with pytest.raises(OSError, match="File too large"):
        read_log(path)
