"""Tables of a report."""

import json

import numpy as np
from helpers.report import write_result, write_run

from jaxdp.report import tables
from jaxdp.report.confusion import MAX_LIST_ROWS, Confusion
from jaxdp.report.run_history import PARTS, read, read_all


def test_summary_lines_of_a_stopped_and_a_finished_run_tell_the_difference(tmp_path):
    stopped, finished = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    write_result(finished)
    lines = tables.summary_lines(read_all([stopped, finished]))
    assert lines[0] == "a: accuracy 75.90 % after 80.00 epochs, best 76.01 % at epoch 60.00. The run is not finished."
    assert lines[1] == "b: accuracy 75.90 % after 80.00 epochs, best 76.01 % at epoch 60.00."


def test_time_table_without_a_result_says_not_measured(tmp_path):
    table = tables.time_table([read(write_run(tmp_path))])
    assert "<td>not measured: jaxdp report --communication</td>" in table
    assert table.count("<td>not measured</td>") == len(PARTS)


def test_time_table_shows_the_exposed_communication_of_this_run(tmp_path):
    run = write_run(tmp_path)
    write_result(run)
    record = {"config": json.loads((run / "config.json").read_text())}
    record["phases"] = [{"steps": 9, "step_seconds": 0.04, "without_reduction_seconds": 0.03}]
    (run / "communication.json").write_text(json.dumps(record))
    assert f"<td>{8.5 / 4:.1f} s ({100 * 8.5 / 4 / 20:.1f} %)</td>" in tables.time_table([read(run)])


def test_differences_table_lists_the_fields_that_differ(tmp_path):
    runs = [read(write_run(tmp_path / name, seed=seed)) for name, seed in (("a", 0), ("b", 7))]
    table = tables.differences_table(runs)
    assert "<th>seed</th><td>0</td><td>7</td>" in table
    assert table.count("<tr>") == 2


def test_numbers_table_shows_devices_of_finished_runs_only(tmp_path):
    run = write_run(tmp_path)
    assert "<th>devices</th>" not in tables.numbers_table([read(run)])
    write_result(run)
    assert "<th>devices</th><td>4 cpu, mesh 2x2</td>" in tables.numbers_table([read(run)])


def test_classes_table_of_many_classes_folds_all_but_the_worst():
    names = [str(number) for number in range(30)]
    table = tables.classes_table(Confusion(np.eye(30, dtype=np.int64), names, "a checkpoint"))
    worst, folded = table.split("<details>")
    assert (worst.count("1 of 1"), folded.count("1 of 1")) == (MAX_LIST_ROWS, 30 - MAX_LIST_ROWS)
