"""The page of `jaxdp watch`: blocks of HTML, each replaced when it changes."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from jaxdp.errors import plural, printable, printable_lines
from jaxdp.loggers.console import format_duration
from jaxdp.records import EVENTS, FAILED, MESSAGE, RESUMING, STOPPED
from jaxdp.report.hover import picture
from jaxdp.report.run_history import History
from jaxdp.report.tables import curves_note, differences_table, numbers_table, remarks, results_table, time_table
from jaxdp.watch.pace import Pace, measure
from jaxdp.watch.runs import WatchedRun

MAX_MESSAGES, MAX_CHARACTERS = 20, 2000  # of a run; of a message
QUIET_SECONDS = 600.0  # a run that trains without a log line for longer is remarked
REFRESH_SECONDS = 10  # without JavaScript
# Blocks in the order of the page, with their headings.
BLOCKS = {
    "progress": "Progress",
    "messages": "Messages",
    "results": "Results",
    "curves": "Loss and accuracy",
    "settings": "Learning rate, momentum, batch size and speed",
    "time": "Wall time",
    "differences": "Differences between the configurations",
    "numbers": "All numbers",
}
FIGURES = {
    "curves": "Loss and accuracy against epochs and against time",
    "settings": "Learning rate, momentum, global batch and images per second against epochs",
    "time": "Shares of the wall time",
}


@dataclass(frozen=True)
class Block:
    """HTML of a part of the page. digest: of the HTML."""

    html: str
    digest: str

    @classmethod
    def of(cls, html: str) -> "Block":
        return cls(html, hashlib.blake2b(html.encode("utf-8", "replace"), digest_size=8).hexdigest())


@dataclass(frozen=True)
class Card:
    """What the page says about the progress of one run. percent: None before the first record."""

    run: WatchedRun
    status: str
    kind: str
    percent: int | None
    facts: dict[str, str]

    @property
    def announcement(self) -> str:
        """For screen readers: changes at each tenth of the run."""
        tenth = "" if self.percent is None or self.kind != "running" else f" {self.percent // 10 * 10} %"
        return f"{self.run.label}: {self.status.partition(',')[0]}{tenth}"


def card(run: WatchedRun) -> Card:
    """The card of a run, of its log and of the time since the log was written."""
    history, end, age = run.history, run.end, run.log_age
    if history is None:
        return Card(run, run.problem or "waiting for a run in this directory", "failed" if run.problem else "waiting", None, {})
    pace = measure(history.records, history.config.epochs, run.session_start)
    percent = int(100 * pace.fraction) if history.records else None
    since = f", last log line {_ago(age)}" if age is not None and history.records else ""
    if history.status == "finished":
        result = history.result
        early = f" early: {printable(result['stop_reason'], 500)}" if result.get("stopped_early") else ""
        return Card(run, f"finished{early}", "finished", 100, _facts(history, pace))
    if history.status == "running":
        quiet = since if age is not None and age > QUIET_SECONDS else ""
        status = f"training{quiet}" if history.records else "starting"
        return Card(run, status, "running", percent, _facts(history, pace))
    if end is not None and end["event"] == FAILED:
        status = f"failed{since}: {printable(end['text'], 500)}"
        return Card(run, status, "failed", percent, _facts(history, pace))
    stopped = end is not None and end["event"] == STOPPED
    return Card(run, f"{'stopped' if stopped else 'not running'}{since}", "stopped", percent, _facts(history, pace))


def _ago(seconds: float) -> str:
    """A time in the past, in units so coarse that the text seldom changes."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return "less than a minute ago"
    if hours < 2:
        return f"{plural(minutes, 'minute')} ago"
    return f"{hours} hours ago" if hours < 48 else f"{hours // 24} days ago"


def _facts(history: History, pace: Pace) -> dict[str, str]:
    """Labels and values of a card."""
    running, training, evaluations = history.status == "running", history.training, history.evaluations
    facts = {"epoch": f"{pace.epoch:.2f} of {history.config.epochs:g}"}
    if running and pace.remaining_seconds is not None:
        limit = "" if history.config.stop.patience is None else ", unless it stops early"
        facts["remaining"] = f"about {format_duration(pace.remaining_seconds)}{limit}"
    if history.status == "finished":
        facts["time"] = format_duration(history.result["wall_seconds"])
        facts["speed"] = f"{history.result['images_per_second']:,.0f} images/s"
    elif pace.images_per_second is not None:
        facts["speed"] = f"{pace.images_per_second:,.0f} images/s"
    if training and training[-1]["loss"] is not None:
        facts["training loss"] = f"{training[-1]['loss']:.4f}"
    if evaluations:
        last, best = evaluations[-1]["eval_accuracy"], max(record["eval_accuracy"] for record in evaluations)
        facts["held-out accuracy"] = f"{100 * last:.2f} %" + (f", best {100 * best:.2f} %" if best > last else "")
    if running and pace.steps_share is not None and pace.input_share is not None and pace.recent_seconds is not None:
        rest = max(0.0, 1 - pace.steps_share - pace.input_share)
        facts[f"time, last {format_duration(pace.recent_seconds)}"] = (
            f"steps {100 * pace.steps_share:.0f} %, waiting for images {100 * pace.input_share:.0f} %, evaluation, saving and "
            f"everything else {100 * rest:.0f} %"
        )
    if running and pace.waiting_share is not None:
        mostly = "" if pace.waiting_share < 0.005 else f", mostly for rank {pace.slowest_rank}"
        facts["waiting for other processes"] = f"{100 * pace.waiting_share:.0f} % of the steps{mostly}"
    skipped = next((record["skipped_steps"] for record in reversed(training) if record.get("skipped_steps")), 0)
    if skipped:
        facts["skipped steps"] = f"{skipped:,.0f}"
    if history.damaged:
        facts["damaged log lines, skipped"] = f"{history.damaged:,}"
    return facts


def _swatch(style: dict[str, Any] | None) -> str:
    """The run's line in the figures; "" for a run that is not in them."""
    if style is None:
        return ""
    dash = style["linestyle"]
    dashes = "" if dash == "-" else f' stroke-dasharray="{" ".join(f"{3 * length:g}" for length in dash[1])}"'
    line = f'<path d="M0 5H34" stroke="{style["color"]}" stroke-width="4"{dashes}/>'
    return f'<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true">{line}</svg> '


def _card_html(card: Card, number: int, style: dict[str, Any] | None) -> str:
    name = f'<h3 id="run-{number}">{_swatch(style)}{escape(card.run.label)}</h3>'
    status = f'<p class="status {card.kind}">{escape(printable_lines(card.status))}</p>'
    bar = ""
    if card.percent is not None:
        value = f"{card.percent} %"
        named = f'aria-labelledby="run-{number}"'
        bar = f'<p class="bar"><progress max="100" value="{card.percent}" {named}>{value}</progress> {value}</p>'
    values = [(label, value.replace(" %", "\N{NO-BREAK SPACE}%")) for label, value in card.facts.items()]
    facts = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in values)
    return f'<article aria-labelledby="run-{number}">{name}{status}{bar}<dl>{facts}</dl></article>'


def progress_block(cards: Sequence[Card], styles: dict[str, dict[str, Any]]) -> Block:
    """A card for each run. styles: of the runs' lines in the figures, by label."""
    articles = (_card_html(card, number, styles.get(card.run.label)) for number, card in enumerate(cards, 1))
    return Block.of(f'<div class="cards">{"".join(articles)}</div>')


def messages_block(runs: Sequence[WatchedRun]) -> Block:
    """The last messages of every run, warnings among them, the newest first; of those that differ in numbers, the newest.

    Where a session began or ended is no such number.
    """
    parts = []
    for run in runs:
        alike: dict[str, list[dict[str, Any]]] = {}
        for event in reversed(run.events):
            if event["event"] in (MESSAGE, STOPPED, FAILED):
                text = event["text"]
                is_position = event["event"] != MESSAGE or text.startswith(RESUMING)
                alike.setdefault(text if is_position else re.sub(r"\d+", "0", text), []).append(event)
        if len(runs) > 1 and alike:
            parts.append(f"<h3>{escape(run.label)}</h3>")
        rows = [_message_html(events[0], len(events)) for events in alike.values()]
        parts.append(f"<ul>{''.join(rows[:MAX_MESSAGES])}</ul>" if rows else "")
        if len(rows) > MAX_MESSAGES:
            parts.append(f'<p class="quiet">Earlier messages are in {escape(printable(run.path / EVENTS, 4096))}.</p>')
    return Block.of("".join(parts) or '<p class="quiet">None.</p>')


def _message_html(event: dict[str, Any], times: int) -> str:
    seconds = event.get("wall_seconds")
    after = "" if seconds is None else f'<span class="quiet">after {format_duration(min(seconds, 1e9))}:</span> '
    text = escape(printable_lines(event["text"][:MAX_CHARACTERS]))
    repeated = f' <span class="quiet">({times} times)</span>' if times > 1 else ""
    return f"<li>{after}{text}{repeated}</li>"


def results_block(runs: list[History]) -> Block:
    """The results table of `jaxdp report`."""
    lines = "".join(f"<p>{escape(line)}</p>" for line in remarks(runs)) if runs else ""
    return Block.of(results_table(runs) + lines if runs else '<p class="quiet">None.</p>')


def detail_blocks(runs: list[History], sources: dict[str, str], layers: dict[str, str]) -> dict[str, Block]:
    """The blocks with figures and long tables. sources: URL of every figure, by name; layers: see `hover.layer`."""

    def figure(name: str) -> str:
        return picture(sources[name], FIGURES[name], layers.get(name, "")) if name in sources else ""

    parts: dict[str, Callable[[], str]] = {
        "curves": lambda: figure("curves") + curves_note(runs),
        "settings": lambda: figure("settings"),
        "time": lambda: figure("time") + time_table(runs),
        "differences": lambda: differences_table(runs) if len(runs) > 1 else "",
        "numbers": lambda: numbers_table(runs),
    }
    return {name: Block.of(part() if runs else "") for name, part in parts.items()}


def whole_page(title: str, announcement: str, blocks: dict[str, Block]) -> str:
    """The page with all its blocks; the script of `jaxdp watch` replaces the blocks that change."""
    sections = []
    for name, heading in BLOCKS.items():
        block = blocks.get(name, Block("", ""))
        hidden = "" if block.html else " hidden"
        sections.append(
            f'<section aria-labelledby="{name}-heading"{hidden}><h2 id="{name}-heading">{heading}</h2>\n'
            f'<div class="block" id="{name}" data-digest="{block.digest}">{block.html}</div></section>\n'
        )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f'<title>{escape(title)}</title><link rel="icon" href="data:,"><link rel="stylesheet" href="style.css">'
    head += f'<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript>'
    head += '<script src="script.js" defer></script>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n<header><h1>jaxdp watch</h1>'
        f'<p id="connection" role="status" class="quiet"></p></header>\n<main>\n{"".join(sections)}</main>\n'
        f'<p id="announcement" class="unseen" role="status">{escape(announcement)}</p>\n</body></html>\n'
    )
