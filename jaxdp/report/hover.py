"""Values on hover: a transparent SVG layer over the picture of a figure, with a title for each point of its curves.

The script of the page shows the nearest one at once; without JavaScript, browsers show the titles.
"""

import math
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D

if TYPE_CHECKING:
    from jaxdp.report.plots import Plot


MAX_POINTS = 1500  # of a figure; longer curves have evenly spaced points


def layer(figure: "Plot") -> str:
    """The layer of a figure that has been drawn, as SVG in pixels of the picture."""
    width, height = figure.bbox.size
    limit = max(2, MAX_POINTS // max(1, len(figure.values)))
    curves = []
    for line, (label, y_unit, x_unit) in figure.values.items():
        circles = []
        for x, y in _thinned(line, limit):
            left, bottom = figure.panel.transData.transform((x, y))
            if all(map(math.isfinite, (left, bottom))):
                text = f"{label} {y:.4g} {y_unit}".rstrip() + f" after {x:.3g} {x_unit}"
                circles.append(
                    f'<circle cx="{left:.0f}" cy="{height - bottom:.0f}" r="7"><title>{escape(text)}</title></circle>'
                )
        if circles:
            curves.append(f"<g>{''.join(circles)}</g>")
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" aria-hidden="true">{"".join(curves)}</svg>'


def _thinned(line: Line2D, limit: int) -> list[tuple[float, float]]:
    """At most `limit` points of a line, evenly spaced, with the first and the last."""
    points = [(float(x), float(y)) for x, y in np.column_stack(line.get_data()) if math.isfinite(y)]
    if len(points) <= limit:
        return points
    return [points[round(number * (len(points) - 1) / (limit - 1))] for number in range(limit)]
