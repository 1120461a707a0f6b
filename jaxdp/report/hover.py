"""Values on hover: a transparent SVG layer over the picture of a figure, with a title for each point of its curves."""

import math
from html import escape

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from jaxdp.report.plots import Plot

MAX_POINTS = 3000  # of a figure; longer curves have evenly spaced points

# Shows the nearest point's value at once, also on touch screens; arrow keys move along a curve and between curves.
# Without JavaScript, browsers show the titles themselves.
SCRIPT = """
function showValues(root) {
  for (const plot of root.querySelectorAll(".plot:has(svg)")) {
    const svg = plot.querySelector("svg"), tip = plot.querySelector("output"), points = [...svg.querySelectorAll("circle")];
    const texts = new Map(points.map(point => [point, point.textContent]));
    const curves = [...svg.querySelectorAll("g")].map(group => [...group.children]);
    points.forEach(point => point.replaceChildren());
    let shown = null;
    const scale = () => svg.viewBox.baseVal.width / svg.getBoundingClientRect().width;
    const show = point => {
      if (point === shown) return;
      shown?.removeAttribute("class");
      tip.hidden = !(shown = point);
      if (!point) return;
      point.setAttribute("class", "shown");
      tip.textContent = texts.get(point);
      const view = plot.parentElement, x = point.cx.baseVal.value / scale(), y = point.cy.baseVal.value / scale();
      const left = x - tip.offsetWidth / 2, end = view.scrollLeft + view.clientWidth - tip.offsetWidth;
      tip.style.left = `${Math.max(view.scrollLeft, Math.min(left, end))}px`;
      tip.style.top = `${y * scale() < 60 ? y + 12 : y - tip.offsetHeight - 12}px`;
    };
    const find = event => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * scale(), y = (event.clientY - box.top) * scale();
      let nearest = null, least = 40;
      for (const point of points) {
        const distance = Math.hypot(point.cx.baseVal.value - x, point.cy.baseVal.value - y);
        if (distance < least) [nearest, least] = [point, distance];
      }
      show(nearest);
    };
    const move = event => {
      const across = {ArrowLeft: -1, ArrowRight: 1}[event.key], between = {ArrowUp: -1, ArrowDown: 1}[event.key];
      if (event.key === "Escape") return show(null);
      if (!(across || between) || !curves.length || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      const at = curves.findIndex(curve => curve.includes(shown)), curve = curves[at];
      let next = curves[0].at(-1);
      if (curve && across) next = curve[Math.max(0, Math.min(curve.indexOf(shown) + across, curve.length - 1))];
      if (curve && between) next = curves[(at + between + curves.length) % curves.length].at(-1);
      const view = plot.parentElement, x = next.cx.baseVal.value / scale();
      if (x < view.scrollLeft || x > view.scrollLeft + view.clientWidth) view.scrollLeft = x - view.clientWidth / 2;
      show(next);
    };
    plot.addEventListener("pointerleave", () => show(null));
    plot.addEventListener("pointermove", find);
    plot.addEventListener("pointerdown", find);
    plot.addEventListener("keydown", move);
    plot.addEventListener("blur", () => show(null));
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `${plot.querySelector("img").alt}; arrow keys show the values`);
  }
}
"""


def picture(source: str, alt: str, layer: str = "") -> str:
    """HTML of a figure. source: URL of its PNG. layer: see `layer`; "" for a figure without values on hover."""
    values = f"{layer}<output hidden></output>" if layer else ""
    return f'<div class="wide"><div class="plot"><img alt="{escape(alt)}" src="{escape(source)}">{values}</div></div>'


def layer(figure: Plot) -> str:
    """The layer of a figure that has been drawn, as SVG in pixels of the picture."""
    width, height = figure.bbox.size
    limit = max(2, MAX_POINTS // max(1, len(figure.values)))
    curves = []
    for line, (label, y_unit, x_unit) in figure.values.items():
        axes = line.axes
        assert isinstance(axes, Axes)
        circles = []
        for x, y in _thinned(line, limit):
            left, bottom = axes.transData.transform((x, y))
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
