"""Values on hover: a transparent SVG layer over the picture of a figure, with a title for each point of its curves."""

import math
from html import escape

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from jaxdp.report.plots import Plot

MAX_POINTS = 3000  # of a figure; longer curves have evenly spaced points

# Shows the nearest point's value at once, also on touch screens. Without JavaScript, browsers show the titles themselves.
SCRIPT = """
for (const plot of document.querySelectorAll(".plot:has(svg)")) {
  const svg = plot.querySelector("svg"), tip = plot.querySelector("output"), points = [...svg.querySelectorAll("circle")];
  const texts = new Map(points.map(point => [point, point.textContent]));
  points.forEach(point => point.replaceChildren());
  let shown = null;
  const show = nearest => {
    shown?.removeAttribute("class");
    tip.hidden = !(shown = nearest);
    nearest?.setAttribute("class", "shown");
  };
  plot.addEventListener("pointerleave", () => show(null));
  const find = event => {
    const box = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width, scale = width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    let nearest = null, least = 40;
    for (const point of points) {
      const distance = Math.hypot(point.cx.baseVal.value - x, point.cy.baseVal.value - y);
      if (distance < least) [nearest, least] = [point, distance];
    }
    if (nearest !== shown) show(nearest);
    if (!nearest) return;
    tip.textContent = texts.get(nearest);
    const view = plot.parentElement, end = view.scrollLeft + view.clientWidth - tip.offsetWidth;
    const left = nearest.cx.baseVal.value / scale - tip.offsetWidth / 2, top = nearest.cy.baseVal.value / scale;
    tip.style.left = `${Math.max(view.scrollLeft, Math.min(left, end))}px`;
    tip.style.top = `${top < 60 ? top + 12 : top - tip.offsetHeight - 12}px`;
  };
  plot.addEventListener("pointermove", find);
  plot.addEventListener("pointerdown", find);
}
"""


def layer(figure: Plot) -> str:
    """The layer of a figure that has been drawn, as SVG in pixels of the picture."""
    width, height = figure.bbox.size
    limit = max(2, MAX_POINTS // max(1, len(figure.values)))
    circles = []
    for line, (label, y_unit, x_unit) in figure.values.items():
        axes = line.axes
        assert isinstance(axes, Axes)
        for x, y in _thinned(line, limit):
            left, bottom = axes.transData.transform((x, y))
            if all(map(math.isfinite, (left, bottom))):
                text = f"{label} {y:.4g} {y_unit}".rstrip() + f" after {x:.3g} {x_unit}"
                circles.append(
                    f'<circle cx="{left:.0f}" cy="{height - bottom:.0f}" r="7"><title>{escape(text)}</title></circle>'
                )
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" aria-hidden="true">{"".join(circles)}</svg>'


def _thinned(line: Line2D, limit: int) -> list[tuple[float, float]]:
    """At most `limit` points of a line, evenly spaced, with the first and the last."""
    points = [(float(x), float(y)) for x, y in np.column_stack(line.get_data()) if math.isfinite(y)]
    if len(points) <= limit:
        return points
    return [points[round(number * (len(points) - 1) / (limit - 1))] for number in range(limit)]
