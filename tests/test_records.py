"""Tests of jaxdp.records."""

from jaxdp.records import to_json


def test_to_json_writes_numbers_that_are_not_finite_as_null():
    assert to_json({"a": float("nan"), "b": float("inf"), "c": 1.5, "d": 3}) == '{"a": null, "b": null, "c": 1.5, "d": 3}'
