"""Tests of jaxdp.records."""

from pathlib import Path

from jaxdp.records import RECORD_FIELDS, to_json


def test_to_json_writes_numbers_that_are_not_finite_as_null():
    assert to_json({"a": float("nan"), "b": float("inf"), "c": 1.5, "d": 3}) == '{"a": null, "b": null, "c": 1.5, "d": 3}'


def test_manual_has_every_field_of_a_record():
    page = (Path(__file__).parents[1] / "docs/watching.md").read_text()
    assert "".join(f"| `{name}` | {meaning} |\n" for name, meaning in RECORD_FIELDS.items()) in page
