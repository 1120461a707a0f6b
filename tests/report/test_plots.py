"""Figures of a report, and the values of their curves on hover."""

import io
import json
import re
from html import unescape

import numpy as np
import pytest
from helpers.report import write_log, write_run
from matplotlib.colors import to_rgb
from PIL import Image

from jaxdp.config import Phase
from jaxdp.report import plots
from jaxdp.report.confusion import ConfusionReport
from jaxdp.report.run_history import read, read_all


def test_curves_of_several_runs_share_panels_and_differ_in_color_and_dash(tmp_path):
    runs = read_all([write_run(tmp_path / name) for name in "abc"])
    held_out = [line for line in plots.metric_figure(runs, "eval_accuracy", "epoch").panel.lines if line.get_linewidth() > 2]
    assert len(held_out) == len({line.get_color() for line in held_out} & {*plots.COLORS}) == 3
    assert [str(style["linestyle"]) for _, style in plots.line_styles(runs)] == [str(dash) for dash in plots.DASHES[:3]]
    styles = [(style["color"], style["linestyle"]) for _, style in plots.line_styles(range(plots.MAX_RUNS))]
    assert len(set(styles)) == plots.MAX_RUNS


def test_curves_have_a_gap_at_a_loss_that_was_not_finite(tmp_path):
    run = write_run(tmp_path)
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 2, "samples": 16, "epoch": 81.0, "loss": null}\n')
        log.write('{"step": 3, "samples": 24, "epoch": 82.0, "loss": 2.0}\n')
    (line,) = plots.metric_figure([read(run)], "eval_loss", "epoch").panel.lines
    np.testing.assert_array_equal(line.get_ydata(), [7.0, np.nan, 2.0])


def test_speeds_are_images_by_seconds_over_several_lines(tmp_path):
    """Every second line claims a million images/s: its metrics were ready before they were fetched."""
    records = [
        {"samples": 10 * n, "epoch": float(n), "loss": 1.0, "images_per_second": 1e6 if n % 2 else 5.0} for n in range(99)
    ]
    (write_run(tmp_path) / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (line,) = plots.value_figure([read(tmp_path)], "images_per_second").panel.lines
    assert max(line.get_ydata()[3:-3]) < 15


@pytest.mark.parametrize(("highest", "scale"), [((16.0, 200.0), "log"), ((100.0, 200.0), "linear")])
@pytest.mark.parametrize("name", ["images_per_second", "learning_rate"])
def test_settings_of_different_scale_are_on_a_labeled_log_axis(tmp_path, name, highest, scale):
    for value in highest:
        records = [{"epoch": epoch, "loss": 1.0, name: value / epoch} for epoch in (1.0, 2.0)]
        write_log(write_run(tmp_path / f"{value}"), records)
    axes = plots.value_figure(read_all([tmp_path / f"{value}" for value in highest]), name).panel
    assert axes.get_yscale() == scale
    assert ("(log scale)" in axes.get_ylabel()) == (scale == "log")


def test_batch_steps_are_where_the_config_says_and_else_at_the_first_line_that_has_them(tmp_path):
    run = write_run(tmp_path, epochs=30.0, batch=(Phase(64, until_epoch=10.0), Phase(128)))
    batches = {1.0: 64, 8.0: 64, 13.0: 128, 20.0: 128, 25.0: 256, 30.0: 256}
    write_log(run, [{"epoch": epoch, "loss": 1.0, "global_batch": batch} for epoch, batch in batches.items()])
    (line,) = plots.value_figure([read(run)], "global_batch").panel.lines
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
    assert [line.get_drawstyle() for line in plots.value_figure(runs, "global_batch").panel.lines] == ["steps-post"]
    (line,) = plots.value_figure(runs, "recall").panel.lines
    assert [*zip(*line.get_data(), strict=True)] == [(2.0, 0.25)]
    assert [figure.panel.get_title() for _, group, figure in plots._figures(runs, ()) if group == "logged"] == [
        "weight norm",
        "recall",
    ]


@pytest.mark.parametrize("drawn", [[1e300, -1e300], [1e300], [5e-324, 1.0]])
def test_values_of_callbacks_that_matplotlib_cannot_draw_are_left_out(tmp_path, drawn):
    values = [1e308, *drawn, -1e308]
    records = [{"epoch": float(n), "loss": 1.0, "recall": value, "far": 1e308} for n, value in enumerate(values)]
    write_log(write_run(tmp_path), records)
    runs = [read(tmp_path)]
    assert plots.logged_names(runs) == ["recall"]
    figure = plots.value_figure(runs, "recall")
    (line,) = figure.panel.lines
    assert list(line.get_ydata()) == drawn
    figure.savefig(io.BytesIO(), format="png")
    assert len(circles(plots.layer(figure))) == len(drawn)


def test_long_names_of_classes_that_begin_alike_have_different_labels():
    names = [f"photographs_of_the_species_number_{number}" for number in range(3)]
    axes = plots.confusion_figure(ConfusionReport(np.eye(3, dtype=np.int64), names, "a checkpoint")).panel
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        texts = [tick.get_text() for tick in ticks]
        assert len(set(texts)) == 3
        assert all(text.startswith("photo") and text.endswith(name[-8:]) for text, name in zip(texts, names, strict=True))


def circles(layer: str) -> list[tuple[int, int, str]]:
    found = re.findall(r'<circle cx="(-?\d+)" cy="(-?\d+)" r="7"><title>(.*?)</title></circle>', layer)
    return [(int(x), int(y), unescape(text)) for x, y, text in found]


def test_layer_has_a_title_on_each_drawn_point(tmp_path):
    figure = plots.metric_figure([read(write_run(tmp_path), "<a>")], "eval_accuracy", "epoch")
    png = io.BytesIO()
    figure.savefig(png, format="png")
    picture = np.asarray(Image.open(png).convert("RGB"), float) / 255
    layer = plots.layer(figure)
    height, width, _ = picture.shape
    assert f'viewBox="0 0 {width} {height}"' in layer
    assert "<a>" not in layer
    accuracies = [(x, y, text) for x, y, text in circles(layer) if "held-out accuracy" in text]
    assert [text for *_, text in accuracies[:4]] == [
        f"<a>: held-out accuracy {value} % after {epoch} epochs"
        for value, epoch in ((50, 20), (70, 40), (76.01, 60), (75.9, 80))
    ]
    for x, y, _ in accuracies:
        np.testing.assert_allclose(picture[y, x], to_rgb(plots.BLUE), atol=0.02)


def test_layer_of_long_curves_is_limited_and_keeps_both_ends():
    figure = plots.PanelFigure("title")
    for name in ("first", "second"):
        values = [float(n) for n in range(100_000)]
        plots._draw_line(figure.panel, values, values, style={}, label=(name, "", "epochs"))
    texts = [text for *_, text in circles(plots.layer(figure))]
    assert len(texts) == plots.MAX_POINTS
    assert texts[0] == "first 0 after 0 epochs"
    assert texts[-1] == "second 1e+05 after 1e+05 epochs"
