"""The data of the plots of a page, compared with the records of the logs."""

import json

import numpy as np
import pytest
from helpers.report import write_log, write_result, write_run

from jaxdp.loggers.plot import COLORS
from jaxdp.report import plots
from jaxdp.report.confusion import ConfusionReport
from jaxdp.report.run_history import read, read_all
from jaxdp.run_records import read_log


def curves(found, name):
    """(x, y) of the curves of a plot, by label of the line and name of the curve."""
    return {
        (found["lines"][curve["line"]]["label"], curve["name"]): (found["positions"][curve["at"]], curve["y"])
        for curve in found["plots"][name]["curves"]
    }


def test_curves_have_the_values_of_the_log_at_their_positions(tmp_path):
    run = write_run(tmp_path)
    records = [
        {
            "step": n,
            "samples": 64 * n,
            "epoch": n / 7,
            "wall_seconds": 3 / n,
            "loss": 1 / n,
            "accuracy": n / 99,
            "momentum": 0.9,
        }
        for n in range(1, 99)
    ]
    evaluations = [{"samples": 64 * n, "epoch": n / 7, "wall_seconds": 2.0, "eval_loss": 2 / n} for n in (30, 60)]
    write_log(run, [*records, *evaluations])
    found = json.loads(plots.as_json(plots.data([read(run, "run")])))
    for name, field, scale in (("loss", "loss", 1), ("accuracy", "accuracy", 100), ("momentum", "momentum", 1)):
        xs, ys = curves(found, name)["run", "training" * (name != "momentum")]
        np.testing.assert_allclose(ys, [scale * record[field] for record in records], rtol=1e-6)
        for axis in ("epoch", "samples", "wall_seconds"):
            np.testing.assert_allclose(xs[axis], [record[axis] for record in records], rtol=1e-6)
    xs, ys = curves(found, "loss")["run", "held-out"]
    np.testing.assert_allclose((xs["samples"], ys), [[64 * 30, 64 * 60], [2 / 30, 2 / 60]], rtol=1e-6)


def test_runs_share_plots_and_differ_in_color_or_dash(tmp_path):
    runs = read_all([write_run(tmp_path / name, epochs=10.0 + number) for number, name in enumerate("abc")])
    assert {label for label, _ in curves(plots.data(runs), "accuracy")} == {"a", "b", "c"}
    lines = plots.legend([runs[0]] * 28)
    assert len({(line.entry["color"], line.entry["dash"]) for line in lines}) == 28
    assert {line.entry["color"] for line in lines} == {*COLORS[:-1], "currentColor"}


def test_curves_have_a_gap_at_a_loss_that_was_not_finite(tmp_path):
    run = write_run(tmp_path)
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 2, "samples": 16, "epoch": 81.0, "loss": null}\n')
        log.write('{"step": 3, "samples": 24, "epoch": 82.0, "loss": NaN}\n')
        log.write('{"step": 4, "samples": 32, "epoch": 83.0, "loss": 2.0}\n')
    assert curves(plots.data([read(run, "run")]), "loss")["run", "training"][1] == [7.0, None, None, 2.0]


def test_long_curves_have_evenly_spaced_values_and_both_ends(tmp_path):
    write_log(write_run(tmp_path), [{"epoch": float(n), "loss": float(n)} for n in range(10 * plots.MAX_POINTS + 8)])
    xs, ys = curves(plots.data([read(tmp_path, "run")]), "loss")["run", "training"]
    assert plots.MAX_POINTS / 2 < len(ys) <= plots.MAX_POINTS + 1
    assert (ys[0], ys[-1]) == (0.0, 10.0 * plots.MAX_POINTS + 7)
    assert {*np.diff(ys[:-1])} == {11.0}
    assert [*xs["epoch"]] == ys


@pytest.mark.parametrize(("highest", "is_log"), [((16.0, 200.0), True), ((100.0, 200.0), False)])
@pytest.mark.parametrize("name", ["images_per_second", "learning_rate"])
def test_settings_of_different_scale_are_on_a_log_axis_at_first(tmp_path, name, highest, is_log):
    for value in highest:
        records = [{"epoch": epoch, "loss": 1.0, name: value / epoch} for epoch in (1.0, 2.0)]
        write_log(write_run(tmp_path / f"{value}"), records)
    found = plots.data(read_all([tmp_path / f"{value}" for value in highest]))
    assert found["plots"][name.replace("_", "-")]["log"] == is_log


def test_numbers_that_callbacks_log_have_plots_and_other_values_none(tmp_path):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", epochs=9.0)
    write_log(first, [{"epoch": 1.0, "loss": 1.0, "weight norm": 3.0}, {"epoch": 2.0, "eval_accuracy": 0.5, "recall": 0.25}])
    write_log(second, [{"epoch": 1.0, "loss": 1.0, "weight norm": None, "note": "text", "key": 10**400, "recall": 10**400}])
    runs = read_all([first, second])
    assert plots.logged_names(runs) == ["weight norm", "recall"]
    found = plots.data(runs)
    assert {name: plot["title"] for name, plot in found["plots"].items() if plot["group"] == "logged"} == {
        "logged-1": "weight norm",
        "logged-2": "recall",
    }
    assert [([*xs["epoch"]], ys) for xs, ys in curves(found, "logged-2").values()] == [([2.0], [0.25])]


@pytest.mark.parametrize("name", ["recall/{}", "recall_{}", "recall {}"])
def test_values_of_many_classes_share_one_plot(tmp_path, name):
    classes = ["cat", "dog", "golden retriever"]
    values = {name.format(one): number / 4 for number, one in enumerate(classes)}
    write_log(write_run(tmp_path), [{"epoch": 1.0, "loss": 1.0, "weight_norm": 3.0} | values])
    found = plots.data([read(tmp_path, "run")])
    assert [plot["title"] for plot in found["plots"].values() if plot["group"] == "logged"] == ["weight_norm", "recall"]
    assert {part: ys for (_, part), (_, ys) in curves(found, "logged-2").items()} == {
        "cat": [0.0],
        "dog": [0.25],
        "golden retriever": [0.5],
    }


def test_data_is_standard_json_that_ends_no_script_whatever_the_names(tmp_path):
    attack = "</script><script>alert(1)</script><!--"
    run = write_run(tmp_path / "run")
    write_log(run, [{"epoch": 1.0, "loss": 1.0, attack: 1.0, "recall\udcff": 2.0}])
    confusion = ConfusionReport(np.eye(3, dtype=np.int64), [attack, "b", "日本"], "a checkpoint")
    text = plots.as_json(plots.data([read(run, attack)], [confusion]))
    assert "<" not in text

    def refuse(constant):
        raise AssertionError(constant)

    found = json.loads(text, parse_constant=refuse)
    assert found["lines"][0]["label"] == attack
    assert found["plots"]["logged-1"]["title"] == attack
    assert len(found["plots"]["classes"]["names"]) == 3


def test_confusion_matrix_has_the_counts_and_the_shares_of_each_label():
    counts = np.array([[7, 1, 0], [0, 9, 1], [0, 0, 0]])
    names = [f"photographs_of_the_species_number_{number}" for number in range(3)]
    plot = plots._matrix("classes-1", ConfusionReport(counts, names, "a checkpoint"))
    assert plot["traces"][0]["text"] == counts.tolist()
    np.testing.assert_allclose(plot["traces"][0]["z"], [[7 / 8, 1 / 8, 0], [0, 0.9, 0.1], [0, 0, 0]])
    assert len(set(plot["names"])) == 3  # although they begin alike


def test_accuracies_of_all_runs_by_class_share_one_plot_from_the_worst_class_on(tmp_path):
    runs = read_all([write_run(tmp_path / name, epochs=10.0 + number) for number, name in enumerate("ab")])
    reports = [ConfusionReport(np.array([[9, 1], [right, 10 - right]]), ["cat", "dog"], "x") for right in (6, 8)]
    plot = plots.data(runs, reports)["plots"]["classes"]
    assert plot["names"] == ["dog", "cat"]
    assert [(trace["lines"], trace["x"], trace["y"]) for trace in plot["traces"]] == [
        ([0], [40.0, 90.0], [0, 1]),
        ([1], [20.0, 90.0], [0, 1]),
    ]


def test_shares_of_the_wall_time_add_up_to_100_percent(tmp_path):
    write_result(write_run(tmp_path))
    plot = plots.data([read(tmp_path, "run")])["plots"]["time"]
    assert sum(trace["x"][0] for trace in plot["traces"]) == pytest.approx(100, abs=1e-4)
    assert {trace["name"]: trace["x"][0] for trace in plot["traces"]}["evaluation"] == pytest.approx(100 * 3 / 20)


def test_log_is_not_needed(tmp_path):
    write_log(write_run(tmp_path), [])
    assert read_log(tmp_path / "metrics.jsonl") == []
    assert plots.data([read(tmp_path)])["plots"] == plots.data([])["plots"] == {}
