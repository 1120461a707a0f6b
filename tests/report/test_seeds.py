"""Statistics of runs that differ in the seed, compared with NumPy."""

import csv
import io
import json

import numpy as np
import pytest
from helpers.report import write_log, write_result, write_run

from jaxdp.cli import main
from jaxdp.config import Logging
from jaxdp.report import metrics_csv, plots
from jaxdp.report.run_history import read_all
from jaxdp.report.seeds import groups
from jaxdp.report.tables import seeds_table

RANDOM = np.random.default_rng(0)
VALUES = {name: RANDOM.random((3, 4)) for name in ("loss", "eval_accuracy", "eval_loss")}  # [runs, positions]


@pytest.fixture
def paths(tmp_path):
    """Three finished runs that differ in the seed, and in what does not change the result, and one of another config."""
    found = [write_run(tmp_path / f"seed{seed}", seed=seed, logging=Logging(every_steps=5 + seed)) for seed in range(3)]
    for number, path in enumerate(found):
        training = [{"samples": 8 * n, "epoch": float(n), "loss": VALUES["loss"][number, n]} for n in range(4)]
        held_out = [
            {"samples": 8 * n, "epoch": float(n)} | {name: VALUES[name][number, n] for name in ("eval_accuracy", "eval_loss")}
            for n in range(4)
        ]
        write_log(path, training + held_out)
        write_result(path)
    return [*found, write_run(tmp_path / "other", epochs=99.0)]


def test_runs_are_grouped_if_their_configs_differ_in_the_seed_alone(paths, tmp_path):
    again = write_run(tmp_path / "again", seed=2)
    (group,) = groups(read_all([*paths, again]))
    assert [run.label for run in group.runs] == ["seed0", "seed1", "seed2"]
    assert groups(read_all([paths[0], paths[3]])) == groups(read_all([paths[2], again])) == []


def test_curves_are_the_mean_and_standard_deviation_of_each_position(paths):
    (group,) = groups(read_all(paths))
    for rows, expected in zip(group.curves(), (np.mean, lambda x, axis: np.std(x, axis, ddof=1)), strict=True):
        for name, values in VALUES.items():
            np.testing.assert_allclose([row[name] for row in rows if name in row], expected(values, axis=0), rtol=1e-12)
        assert [row["samples"] for row in rows] == [0, 8, 16, 24] * 2
        assert {row["seeds"] for row in rows} == {3}


def test_mean_covers_the_positions_that_all_runs_have_and_is_none_if_one_is_not_finite(paths):
    write_log(paths[1], [{"samples": 8, "epoch": 1.0, "loss": None}, {"samples": 16, "epoch": 2.0, "loss": 0.5, "text": "x"}])
    (group,) = groups(read_all(paths))
    means, deviations = group.curves()
    losses = VALUES["loss"][0, 2], 0.5, VALUES["loss"][2, 2]
    assert [(row["samples"], row["loss"]) for row in means] == [(8, None), (16, pytest.approx(np.mean(losses)))]
    assert [row["loss"] for row in deviations] == [None, pytest.approx(np.std(losses, ddof=1))]


def test_results_are_of_the_finished_runs(paths):
    (paths[1] / "result.json").unlink()
    (group,) = groups(read_all(paths))
    found, last = group.summary(), VALUES["eval_accuracy"][[0, 2], -1]
    assert (found["number"], found["seeds"]) == (2, [0, 1, 2])
    assert found["mean"]["accuracy"] == pytest.approx(np.mean(last))
    assert found["standard_deviation"]["accuracy"] == pytest.approx(np.std(last, ddof=1))
    assert f'<td data-label="accuracy">{100 * np.mean(last):.2f} % ± {100 * np.std(last, ddof=1):.2f} %</td>' in seeds_table(
        group.runs
    )
    (paths[2] / "result.json").unlink()
    (group,) = groups(read_all(paths))
    assert (group.summary()["number"], group.summary()["mean"]) == (1, {})
    assert "no mean yet" in str(group)


def test_csv_json_and_text_have_the_statistics(paths, tmp_path, capsys):
    words = ["report", *map(str, paths), "--no-html"]
    main.main([*words, "--csv", str(tmp_path / "metrics.csv")])
    mean, deviation = np.mean(VALUES["eval_accuracy"][:, -1]), np.std(VALUES["eval_accuracy"][:, -1], ddof=1)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"seed0 and 2 more seeds: accuracy {100 * mean:.2f} % ± {100 * deviation:.2f} %, held-out loss ")
    assert line.endswith("(mean and standard deviation of 3 finished runs)")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "metrics.csv").read_text(), newline="")))
    for name, expected in (("mean", mean), ("standard deviation", deviation)):
        found = [row for row in rows if row["run"] == f"seed0 and 2 more seeds: {name}"]
        assert float(found[-1]["eval_accuracy"]) == pytest.approx(expected)
        assert {row["seeds"] for row in found} == {"3"}
    assert {row["seeds"] for row in rows if ":" not in row["run"]} == {""}
    main.main([*words, "--json"])
    *grouped, other = json.loads(capsys.readouterr().out)
    assert other["seeds"] is None
    for document in grouped:
        assert document["seeds"]["workdirs"] == [*map(str, paths[:3])]
        assert document["seeds"]["mean"]["accuracy"] == pytest.approx(mean)
        assert document["seeds"]["standard_deviation"]["accuracy"] == pytest.approx(deviation)


def test_plots_have_the_mean_with_its_deviation_and_the_runs_hidden_at_first(paths):
    found = plots.data(read_all(paths))
    assert {line["label"]: line["shown"] for line in found["lines"]} == {
        "seed0 and 2 more seeds": True,
        **dict.fromkeys(("seed0", "seed1", "seed2"), False),
        "other": True,
    }
    (curve,) = (one for one in found["plots"]["accuracy"]["curves"] if one["line"] == 0)
    np.testing.assert_allclose(curve["y"], 100 * VALUES["eval_accuracy"].mean(0), rtol=1e-6)
    np.testing.assert_allclose(curve["deviation"], 100 * VALUES["eval_accuracy"].std(0, ddof=1), rtol=1e-6)


def test_table_of_runs_without_seeds_has_no_statistics(paths):
    assert seeds_table(read_all(paths[2:])) == ""
    assert "seeds" not in metrics_csv({"other": read_all(paths[3:])[0].records}).splitlines()[0]
