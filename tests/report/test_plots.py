"""Figures of a report."""

import numpy as np
from helpers.report import write_run

from jaxdp.report import plots
from jaxdp.report.run_history import read, read_all


def test_curves_of_several_runs_share_panels_and_differ_in_color_and_dash(tmp_path):
    runs = read_all([write_run(tmp_path / name) for name in "abc"])
    held_out = [line for line in plots.curves_figure(runs).axes[2].lines if line.get_linewidth() > 2]
    assert len(held_out) == len({line.get_color() for line in held_out} & {*plots.COLORS}) == 3
    assert [str(style["linestyle"]) for _, style in plots.line_styles(runs)] == [str(dash) for dash in plots.DASHES[:3]]
    styles = [(style["color"], style["linestyle"]) for _, style in plots.line_styles(range(plots.MAX_RUNS))]
    assert len(set(styles)) == plots.MAX_RUNS


def test_curves_have_a_gap_at_a_loss_that_was_not_finite(tmp_path):
    run = write_run(tmp_path)
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 2, "samples": 16, "epoch": 81.0, "loss": null}\n')
        log.write('{"step": 3, "samples": 24, "epoch": 82.0, "loss": 2.0}\n')
    (line,) = plots.curves_figure([read(run)]).axes[0].lines
    np.testing.assert_array_equal(line.get_ydata(), [7.0, np.nan, 2.0])


def test_smooth_speeds_divide_images_by_seconds_over_several_lines():
    lines = [{"samples": 10 * n, "epoch": float(n), "images_per_second": 1e6 if n % 2 else 5.0} for n in range(1, 81)]
    speeds = plots.smooth_speeds(lines, most=40)
    assert [speed["epoch"] for speed in speeds] == [float(n) for n in range(2, 81, 2)]
    assert {round(speed["images_per_second"], 3) for speed in speeds} == {round(20 / (10 / 1e6 + 10 / 5.0), 3)}
