"""The metrics of several runs as CSV and JSON: read by Python's csv and json, strictly."""

import csv
import io
import json
import math

import pytest
from helpers.report import write_run

from jaxdp.cli import main
from jaxdp.report import metrics_csv
from jaxdp.run_records import read_log

SECOND = ' the, "second"\r日本'  # the name of a run


def rows(text):
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def test_csv_has_a_row_for_every_record_and_its_values_bit_for_bit():
    runs = {
        "first": [{"step": 1, "samples": 8, "epoch": 0.1, "loss": 1 / 3}, {"samples": 8, "epoch": 0.1, "eval_loss": 2e-308}],
        SECOND: [{"samples": 2**53 + 1, "step": 3, "epoch": 1e22, "loss": -0.0, "own": "text"}],
    }
    table = rows(metrics_csv(runs))
    assert list(table[0]) == ["run", "samples", "step", "epoch", "loss", "eval_loss", "own"]
    assert [row["run"] for row in table] == ["first", "first", SECOND]
    for row, record in zip(table, [record for records in runs.values() for record in records], strict=True):
        for name, value in record.items():
            assert type(value)(row[name]) == value
        assert {name for name, cell in row.items() if cell != ""} == {"run", *record}


def test_value_that_is_not_finite_is_nan_and_a_missing_one_is_empty():
    values = (None, math.nan, math.inf, -math.inf)
    table = rows(metrics_csv({"a": [*({"samples": 1, "eval_loss": value} for value in values), {"samples": 2}]}))
    assert [row["eval_loss"] for row in table] == ["NaN"] * 4 + [""]


@pytest.fixture
def run(tmp_path):
    path = write_run(tmp_path / "run")
    log = path / "metrics.jsonl"
    log.write_text(
        log.read_text() + '{"samples": 4001, "epoch": 81.0, "wall_seconds": 9.0, "loss": NaN, "gradient_norm": null}\n'
    )
    return path


def test_report_writes_csv_to_a_file_or_stdout(run, tmp_path, capsys):
    main.main(["report", str(run), "--no-html", "--csv", str(tmp_path / "new/metrics.csv")])
    assert "accuracy" in capsys.readouterr().out
    written = (tmp_path / "new/metrics.csv").read_bytes().decode()
    main.main(["report", str(run), "--no-html", "--csv", "-"])
    out, err = capsys.readouterr()
    assert (out, "accuracy" in err) == (written, True)
    main.main(["report", str(run), "--no-html", "--csv", str(tmp_path / "new/metrics.csv"), "--overwrite"])
    table = rows(written)
    assert len(table) == len(read_log(run / "metrics.jsonl"))
    assert (table[-1]["run"], table[-1]["loss"], table[-1]["gradient_norm"]) == ("run", "NaN", "NaN")


def test_json_has_the_records_of_the_log_without_nan(run, capsys):
    main.main(["report", str(run), "--no-html", "--json"])

    def refuse(constant):
        raise AssertionError(constant)

    (document,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    expected = read_log(run / "metrics.jsonl")
    assert math.isnan(expected[-1].pop("loss"))
    assert document["metrics"][-1].pop("loss") is None
    assert document["metrics"] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--csv", "-", "--json"], "--csv='-': not possible with --json"),
        (["--csv", "{old}"], "--csv='{old}': file exists"),
        (["{run}", "--csv", "-"], "WORKDIR: a run is given twice"),
    ],
)
def test_unusable_csv_exits_with_2_and_one_line(run, tmp_path, capsys, words, message):
    old = tmp_path / "old.csv"
    old.write_text("mine")
    fill = {"old": old, "run": run}
    with pytest.raises(SystemExit) as stopped:
        main.main(["report", str(run), *(word.format(**fill) for word in words), "--no-html"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"jaxdp: {message.format(**fill)}")
    assert old.read_text() == "mine"
