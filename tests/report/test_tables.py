import dataclasses
import json
import re

import pytest
from helpers.report import write_result, write_run

from jaxdp.config import Stop
from jaxdp.recipes import load_config
from jaxdp.report import tables
from jaxdp.report.run_history import PARTS, read, read_all


def cells(table: str) -> dict[str, dict[str, str]]:
    """A table as run -> column -> cell."""
    header, *rows = re.findall(r"<tr>(.*?)</tr>", table)
    titles = re.findall(r"<th>(.*?)</th>", header)
    return {
        row[0]: dict(zip(titles, row, strict=True)) for row in (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", text) for text in rows)
    }


def test_results_table_has_a_row_per_run_and_marks_the_best_values(tmp_path):
    better, worse = write_run(tmp_path / "a", accuracies=(0.5, 0.9)), write_run(tmp_path / "b", accuracies=(0.5, 0.8))
    write_result(worse, wall_seconds=90.0)
    rows = cells(tables.results_table(read_all([better, worse])))
    assert rows.keys() == {"a", "b"}
    assert rows["a"] | {"status": "killed", "accuracy": "<strong>90.00 %</strong>", "time": "—"} == rows["a"]
    batches = " → ".join(str(phase.global_batch) for phase in load_config("digits").batch)
    expected = {"status": "finished", "accuracy": "80.00 %", "epochs": "40.00", "steps": "1", "global batch": batches}
    expected |= {"learning rate": "lars 0.4", "devices": "4 cpu", "time": "1:30", "images/s": "9"}
    assert rows["b"] | expected == rows["b"]
    assert {"top-5", "held-out loss"}.isdisjoint(rows["b"])  # in no log
    assert cells(tables.more_numbers_table(read_all([better, worse])))["mesh"] == {"": "mesh", "a": "—", "b": "2x2"}


def test_results_table_marks_no_equal_values_and_no_times_as_those_of_single_runs_vary(tmp_path):
    for run, seconds in (("quick", 60.0), ("slow", 90.0)):
        write_result(write_run(tmp_path / run, seed=int(seconds)), wall_seconds=seconds, images_per_second=900 / seconds)
    runs = read_all([tmp_path / "quick", tmp_path / "slow"])
    assert "<strong>" not in tables.results_table(runs)
    differences = cells(tables.differences_table(runs))
    assert differences == {"seed": {"field": "seed", "quick": "60", "slow": "90"}}
    assert tables.differences_table([runs[0], runs[0]]) == "<p>The configurations are the same.</p>"


@pytest.mark.parametrize(("name", "low", "high"), [("accuracy", 0, 1), ("top5", 0, 1), ("loss", 1, 0)])
def test_results_table_marks_the_highest_accuracy_and_the_lowest_loss(tmp_path, name, low, high):
    for run, value in (("low", 0.25), ("high", 0.75)):
        write_run(tmp_path / run, accuracies=())
        record = {"step": 1, "samples": 8, "epoch": 1.0, "eval_accuracy": 0.5, f"eval_{name}": value}
        (tmp_path / run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    rows = cells(tables.results_table(read_all([tmp_path / "low", tmp_path / "high"])))
    assert [row.count("<strong>") for row in (" ".join(rows["low"].values()), " ".join(rows["high"].values()))] == [low, high]


def test_results_table_of_a_run_that_stopped_early_has_the_best_checkpoint(tmp_path):
    """The third evaluation is the result; the last one is at 4000 samples."""
    run = write_run(tmp_path / "run", accuracies=(0.5, 0.7, 0.8, 0.6), stop=Stop(patience=1))
    reason = "eval_accuracy did not improve for 1 evaluation"
    write_result(run, best_samples=3000, stopped_early=True, stop_reason=reason)
    table = tables.results_table([read(run)])
    (row,) = cells(table).values()
    assert (row["status"], row["accuracy"]) == ("stopped early", "80.00 %")
    assert reason in tables.more_numbers_table([read(run)])


def test_curves_note_names_the_runs_of_each_kind_of_labels(tmp_path):
    mixed = dataclasses.replace(load_config("digits").data, mix="cutmix")
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", data=mixed), write_run(tmp_path / "c")]
    note = tables.curves_note(read_all(runs))
    assert "labels smoothed by 0.1 (a, c); labels smoothed by 0.1, labels mixed by cutmix (b)" in note
    assert "training batches, labels smoothed by 0.1. Held-out loss" in tables.curves_note([read(runs[0])])


def test_time_table_without_a_result_says_not_measured(tmp_path):
    assert tables.time_table([read(write_run(tmp_path))]).count(">not measured</td>") == len(PARTS) + 1
