"""The page about runs, finished or running: made from their files, written by `jaxdp report` and served by `jaxdp watch`."""

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from jaxdp.errors import plural, printable
from jaxdp.loggers.smoothing import SHARE
from jaxdp.report.cards import Seen, card, cards_html, messages_html, swatch, text_html
from jaxdp.report.confusion import ConfusionReport
from jaxdp.report.plots import MAX_LOGGED, X_AXES, as_json, logged_names
from jaxdp.report.tables import (
    classes_table,
    curves_note,
    differences_table,
    more_numbers_table,
    remarks,
    results_table,
    seeds_table,
    time_table,
)

REFRESH_SECONDS = 10  # without JavaScript
FOOTER = '<footer class="quiet">'
STYLE, SCRIPT = ((files("jaxdp.report") / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))


def page(
    runs: Sequence[Seen],
    plots: dict[str, Any],
    scripts: str,
    *,
    confusions: Sequence[ConfusionReport | str] = (),
    follows: bool = False,
    head: str = "",
    foot: str = "",
) -> str:
    """The HTML page. plots: `plots.data` of the runs. scripts: the elements with Plotly and `SCRIPT`. confusions: of the
    runs, or why they are missing; "" without a remark.

    follows: whether it asks the server for changes. head: more elements of the head. foot: text at the end.
    """
    histories = [run.history for run in runs if run.history is not None]
    cards = [card(run) for run in runs]

    def figures(group: str) -> str:
        found = "".join(_figure(name, plot["title"]) for name, plot in plots["plots"].items() if plot["group"] == group)
        return f'<div class="plots">{found}</div>' if found else ""

    evaluated = enumerate(zip(runs, confusions, strict=False), 1)
    classes = "".join(f"<div>{_classes(number, run, of, figures=figures)}</div>" for number, (run, of) in evaluated if of)
    sections = {"Progress": cards_html(cards, plots["lines"]), "Messages": messages_html(runs)}
    if histories:
        sections |= {
            "Results": results_table(histories) + "".join(f"<p>{escape(line)}</p>" for line in remarks(histories)),
            "Several seeds": seeds_table(histories),
            "Runs in the plots": _controls(plots["lines"]) if plots["plots"] else "",
            "Loss and metrics": (figures("curves") or "<p>No curves yet.</p>") + curves_note(histories),
            "Learning rate, momentum, batch size and speed": figures("settings"),
            "Values of callbacks": figures("logged") + _left_out(logged_names(histories)[MAX_LOGGED:]),
            "Wall time": f'<div class="beside">{figures("time")}<div>{time_table(histories)}</div></div>',
            "Classes": classes and f'{figures("classes")}<div class="plots">{classes}</div>',
            "Differences between the configurations": differences_table(histories) if len(histories) > 1 else "",
            "More numbers": more_numbers_table(histories),
        }
    body = "".join(
        f'<section id="section-{number}" aria-labelledby="heading-{number}"><h2 id="heading-{number}">{heading}</h2>\n'
        f"{content}</section>\n"
        for number, (heading, content) in enumerate(sections.items())
        if content
    )
    names = ", ".join(run.label for run in runs) if len(runs) <= 3 else f"{runs[0].label} and {len(runs) - 1} more runs"
    percents = [f"{one.percent} %" for one in cards if one.kind == "running" and one.percent is not None]
    title = " · ".join([", ".join(percents[:3])] * bool(percents) + [names])
    if follows:
        head += f'<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript>'
    return (
        f'<!doctype html>\n<html lang="en"{" data-follow" * follows}><head><meta charset="utf-8">{head}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n<header><h1>{escape(names)}</h1>"
        f'<p id="connection" role="status" class="quiet"></p></header>\n<main>\n{body}</main>\n'
        f'<p id="announcement" class="unseen" role="status">{escape("; ".join(one.announcement for one in cards))}</p>\n'
        f'{FOOTER}{escape(foot)}</footer>\n<script type="application/json" id="data">{as_json(plots)}</script>\n'
        f"{scripts}\n</body></html>\n"
    )


def with_foot(html: str, foot: str) -> str:
    """A page with another text at its end."""
    before, _, after = html.partition(FOOTER)
    return f"{before}{FOOTER}{escape(foot)}</footer>{after.partition('</footer>')[2]}"


def _left_out(names: Sequence[str]) -> str:
    """A sentence on values that have no plot."""
    if not names:
        return ""
    number, first = plural(len(names), "more value"), escape(printable(names[0]))
    return f"<p>{number} without a plot, from {first} on: <code><span>jaxdp report --csv FILE</span></code></p>"


def _figure(name: str, title: str) -> str:
    """The place of a plot, until the script has drawn it."""
    return (
        f'<figure class="plot" id="plot-{name}"><figcaption>{escape(title)}</figcaption>'
        "<div><p>Drawing\N{HORIZONTAL ELLIPSIS}</p><noscript>Plots need JavaScript.</noscript></div></figure>"
    )


def _controls(lines: Sequence[dict[str, Any]]) -> str:
    """The legend and the axes of all plots."""
    axes = "".join(f'<option value="{name}">{title}</option>' for name, title in X_AXES.items())
    boxes = "".join(
        f'<label><input type="checkbox" name="line {escape(line["label"])}"{" checked" * line["shown"]}>'
        f"{swatch(line)} {escape(line['label'])}</label>"
        for line in lines
    )
    return (
        f'<form id="controls" name="controls" autocomplete="off"><fieldset>{boxes}</fieldset><p>'
        f'<label>x axis <select name="axis">{axes}</select></label> '
        '<label><input type="checkbox" name="logx"> logarithmic</label> '
        '<label>y axis <select name="scale"><option value="auto">by its values</option><option>linear</option>'
        '<option value="log">logarithmic</option></select></label> '
        f'<label>smoothing <input type="range" name="smoothing" max="25" value="{100 * SHARE:g}"></label></p></form>'
    )


def _classes(number: int, run: Seen, confusion: ConfusionReport | str, *, figures: Callable[[str], str]) -> str:
    """Accuracy by class and confusion matrix of a run."""
    heading = f"<h3>{escape(run.label)}</h3>"
    if isinstance(confusion, str):
        return f"{heading}<p>Accuracy by class and confusion matrix {text_html(confusion)}.</p>"
    return (
        f"{heading}<p>{escape(confusion.caption)}.</p>{figures(f'classes-{number}')}<details><summary>Table</summary>{classes_table(confusion)}"
        f'<p class="quiet">Next to this page, classes-{number}.csv lists all classes, and confusions-{number}.csv all pairs of '
        "label and prediction with their numbers of images.</p></details>"
    )
