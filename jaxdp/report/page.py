"""The page about runs, finished or running: made from their files, written by `jaxdp report` and served by `jaxdp watch`."""

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files

from jaxdp.errors import plural, printable
from jaxdp.report.cards import Seen, card, cards_html, messages_html, text_html
from jaxdp.report.confusion import ConfusionReport
from jaxdp.report.plots import MAX_LOGGED, Picture, line_styles, logged_names
from jaxdp.report.tables import (
    classes_table,
    curves_note,
    differences_table,
    more_numbers_table,
    remarks,
    results_table,
    time_table,
)

REFRESH_SECONDS = 10  # without JavaScript
FOOTER = '<footer class="quiet">'
STYLE, SCRIPT = ((files("jaxdp.report") / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))


def page(
    runs: Sequence[Seen],
    pictures: dict[str, Picture],
    source: Callable[[Picture], str],
    *,
    confusions: Sequence[ConfusionReport | str] = (),
    follows: bool = False,
    draws: bool = False,
    head: str = "",
    foot: str = "",
) -> str:
    """The HTML page. source: picture -> URL of its PNG. confusions: of the runs, or why they are missing; "" without a remark.

    follows: whether it asks the server for changes. draws: whether newer figures are being drawn. head: more
    elements of the head. foot: text at the end.
    """
    histories = [run.history for run in runs if run.history is not None]
    cards = [card(run) for run in runs]
    styles = {run.label: style for run, style in line_styles(histories)}

    def figures(group: str) -> str:
        plots_html = "".join(_figure(one, source(one)) for one in pictures.values() if one.group == group)
        return f'<div class="plots">{plots_html}</div>' if plots_html else ""

    none_yet = "The curves are being drawn." if draws else "No curves yet."
    sections = {"Progress": cards_html(cards, styles), "Messages": messages_html(runs)}
    if histories:
        sections |= {
            "Results": results_table(histories) + "".join(f"<p>{escape(line)}</p>" for line in remarks(histories)),
            "Loss and metrics": (figures("curves") or f"<p>{none_yet}</p>") + curves_note(histories),
            "Learning rate, momentum, batch size and speed": figures("settings"),
            "Values of callbacks": figures("logged") + _left_out(logged_names(histories)[MAX_LOGGED:]),
            "Wall time": f'<div class="beside">{figures("time")}<div>{time_table(histories)}</div></div>',
            "Classes": "".join(
                _classes(number, run, figures) for number, run in enumerate(zip(runs, confusions, strict=False), 1) if run[1]
            ),
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
        f"{FOOTER}{escape(foot)}</footer>\n<script>{SCRIPT}</script>\n</body></html>\n"
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


def _figure(picture: Picture, source: str) -> str:
    values = f"{picture.layer}<output hidden></output>" if picture.layer else ""
    return f'<div class="plot"><img alt="{escape(picture.alt)}" src="{escape(source)}">{values}</div>'


def _classes(number: int, evaluated: tuple[Seen, ConfusionReport | str], figures: Callable[[str], str]) -> str:
    """Accuracy by class and confusion matrix of a run."""
    run, confusion = evaluated
    heading = f"<h3>{escape(run.label)}</h3>"
    if isinstance(confusion, str):
        return f"{heading}<p>Accuracy by class and confusion matrix {text_html(confusion)}.</p>"
    return (
        f"{heading}<p>{escape(confusion.caption)}.</p>{figures(f'classes-{number}')}{classes_table(confusion)}"
        f'<p class="quiet">Next to this page, classes-{number}.csv lists all classes, and confusions-{number}.csv all pairs of '
        "label and prediction with their numbers of images.</p>"
    )
