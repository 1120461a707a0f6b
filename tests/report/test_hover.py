"""Values of curves on hover."""

import io
import re
from html import unescape

import numpy as np
from helpers.report import write_run
from matplotlib.colors import to_rgb
from PIL import Image

from jaxdp.report import hover, plots
from jaxdp.report.run_history import read


def circles(layer: str) -> list[tuple[int, int, str]]:
    found = re.findall(r'<circle cx="(-?\d+)" cy="(-?\d+)" r="7"><title>(.*?)</title></circle>', layer)
    return [(int(x), int(y), unescape(text)) for x, y, text in found]


def test_layer_has_a_title_on_each_drawn_point(tmp_path):
    figure = plots.metric_figure([read(write_run(tmp_path), "<a>")], "accuracy", "epoch")
    png = io.BytesIO()
    figure.savefig(png, format="png")
    picture = np.asarray(Image.open(png).convert("RGB"), float) / 255
    layer = hover.layer(figure)
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
    figure = plots.Plot("title")
    for name in ("first", "second"):
        values = [float(n) for n in range(100_000)]
        plots._draw_line(figure.panel, values, values, style={}, label=(name, "", "epochs"))
    texts = [text for *_, text in circles(hover.layer(figure))]
    assert len(texts) == hover.MAX_POINTS
    assert texts[0] == "first 0 after 0 epochs"
    assert texts[-1] == "second 1e+05 after 1e+05 epochs"
