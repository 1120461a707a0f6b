"""Figures of a report."""

import json

import numpy as np
import pytest
from helpers.report import write_run

from jaxdp.config import Phase
from jaxdp.report import plots
from jaxdp.report.run_history import read, read_all


def test_curves_of_several_runs_share_panels_and_differ_in_color_and_dash(tmp_path):
    runs = read_all([write_run(tmp_path / name) for name in "abc"])
    held_out = [line for line in plots.metric_figure(runs, "accuracy", "epoch").panel.lines if line.get_linewidth() > 2]
    assert len(held_out) == len({line.get_color() for line in held_out} & {*plots.COLORS}) == 3
    assert [str(style["linestyle"]) for _, style in plots.line_styles(runs)] == [str(dash) for dash in plots.DASHES[:3]]
    styles = [(style["color"], style["linestyle"]) for _, style in plots.line_styles(range(plots.MAX_RUNS))]
    assert len(set(styles)) == plots.MAX_RUNS


def test_curves_have_a_gap_at_a_loss_that_was_not_finite(tmp_path):
    run = write_run(tmp_path)
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 2, "samples": 16, "epoch": 81.0, "loss": null}\n')
        log.write('{"step": 3, "samples": 24, "epoch": 82.0, "loss": 2.0}\n')
    (line,) = plots.metric_figure([read(run)], "loss", "epoch").panel.lines
    np.testing.assert_array_equal(line.get_ydata(), [7.0, np.nan, 2.0])


def test_speeds_are_images_by_seconds_over_several_lines(tmp_path):
    """Every second line claims a million images/s: its metrics were ready before they were fetched."""
    records = [
        {"samples": 10 * n, "epoch": float(n), "loss": 1.0, "images_per_second": 1e6 if n % 2 else 5.0} for n in range(99)
    ]
    (write_run(tmp_path) / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (line,) = plots.setting_figure([read(tmp_path)], "images_per_second").panel.lines
    assert max(line.get_ydata()[3:-3]) < 15


def with_rates(path, peak: float):
    """A run whose log has a learning rate that rises to a peak."""
    run = write_run(path)
    with open(run / "metrics.jsonl", "a") as log:
        for epoch, share in ((90.0, 0.5), (91.0, 1.0)):
            log.write(json.dumps({"step": 2, "samples": 9, "epoch": epoch, "loss": 1.0, "learning_rate": share * peak}) + "\n")
    return run


@pytest.mark.parametrize(("peaks", "drawn"), [((10.0, 0.001), (1.0, 1.0)), ((1.0, 0.4), (1.0, 0.4))])
def test_learning_rates_of_different_scale_are_fractions_of_their_peaks(tmp_path, peaks, drawn):
    runs = read_all([with_rates(tmp_path / f"run-{peak}", peak) for peak in peaks])
    figure = plots.setting_figure(runs, "learning_rate")
    panel = figure.panel
    assert [np.nanmax(line.get_ydata()) for line in panel.lines] == pytest.approx(drawn)
    normalized = peaks != drawn
    assert ("fraction" in panel.get_ylabel()) == normalized
    texts = " ".join(text.get_text() for text in figure.legends[0].get_texts())
    assert [f"{peak:g}" in texts.replace("run-" + str(peak), "") for peak in peaks] == [normalized] * 2


@pytest.mark.parametrize(("speeds", "scale"), [((16.0, 200.0), "log"), ((100.0, 200.0), "linear")])
def test_speeds_of_different_scale_are_on_a_labeled_log_axis(tmp_path, speeds, scale):
    for speed in speeds:
        record = {"step": 1, "epoch": 1.0, "loss": 1.0, "images_per_second": speed}
        lines = [json.dumps(record | {"samples": samples}) + "\n" for samples in (64, 128)]
        (write_run(tmp_path / f"{speed}") / "metrics.jsonl").write_text("".join(lines))
    axes = plots.setting_figure(read_all([tmp_path / f"{speed}" for speed in speeds]), "images_per_second").panel
    assert axes.get_yscale() == scale
    assert ("(log scale)" in axes.get_ylabel()) == (scale == "log")


def write_log(run, records):
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": 1, "samples": 8} | record) + "\n" for record in records))


def test_batch_steps_are_where_the_config_says_and_else_at_the_first_line_that_has_them(tmp_path):
    run = write_run(tmp_path, epochs=30.0, batch=(Phase(64, until_epoch=10.0), Phase(128)))
    batches = {1.0: 64, 8.0: 64, 13.0: 128, 20.0: 128, 25.0: 256, 30.0: 256}
    write_log(run, [{"epoch": epoch, "loss": 1.0, "global_batch": batch} for epoch, batch in batches.items()])
    (line,) = plots.setting_figure([read(run)], "global_batch").panel.lines
    assert line.get_drawstyle() == "steps-post"
    assert [*zip(*line.get_data(), strict=True)] == [(0.0, 64), (10.0, 128), (25.0, 256), (30.0, 256)]


def test_every_number_that_callbacks_log_has_a_panel(tmp_path):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    write_log(
        first,
        [
            {"epoch": 1.0, "loss": 1.0, "weight norm": 3.0, "global_batch": 64},
            {"epoch": 2.0, "eval_accuracy": 0.5, "recall": 0.25},
        ],
    )
    write_log(second, [{"epoch": 1.0, "loss": 1.0, "weight norm": None, "note": "text", "key": 10**400, "recall": 10**400}])
    runs = read_all([first, second])
    assert plots.logged_names(runs) == ["weight norm", "recall"]
    assert [line.get_drawstyle() for line in plots.setting_figure(runs, "global_batch").panel.lines] == ["steps-post"]
    (line,) = plots.logged_figure(runs, "recall").panel.lines
    assert [*zip(*line.get_data(), strict=True)] == [(2.0, 0.25)]
    assert [figure.panel.get_title() for _, group, figure in plots._figures(runs, ()) if group == "logged"] == [
        "weight norm",
        "recall",
    ]
