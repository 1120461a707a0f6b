"""What the page says about the progress of each run: a card, and its last messages."""

import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from jaxdp.choices import SOURCES
from jaxdp.errors import plural, printable, printable_lines
from jaxdp.files import CONFIG, is_url
from jaxdp.loggers.console import format_duration
from jaxdp.metrics import METRICS, title_of
from jaxdp.report.pace import Pace, measure
from jaxdp.report.plots import DASHES
from jaxdp.report.run_history import History
from jaxdp.report.summary import best_evaluation
from jaxdp.run_records import EVENTS, FAILED, MESSAGE, RESUMING, START, STOPPED
from jaxdp.validation import REGISTRIES, flatten

MAX_MESSAGES, MAX_CHARACTERS = 20, 2000  # of a run; of a message
QUIET_SECONDS = 600.0  # a run that trains without a log line for longer is pointed out


@dataclass(frozen=True)
class Seen:
    """A run on a page. history: None if there is none yet, or if it cannot be read; problem: why it cannot be read.

    log_age: seconds since its log was written, None if unknown.
    """

    label: str
    history: History | None
    problem: str | None = None
    log_age: float | None = None


@dataclass(frozen=True)
class Card:
    """What the page says about the progress of one run.

    percent: None before the first record. hint: how to continue it, as HTML.
    """

    run: Seen
    status: str
    kind: str
    percent: int | None = None
    facts: dict[str, str] | None = None
    hint: str = ""

    @property
    def announcement(self) -> str:
        """For screen readers: changes at each tenth of the run."""
        tenth = "" if self.percent is None or self.kind != "running" else f" {self.percent // 10 * 10} %"
        return f"{self.run.label}: {self.status.partition(',')[0]}{tenth}"


def card(run: Seen) -> Card:
    """The card of a run, of its log and of the time since the log was written."""
    history, age = run.history, run.log_age
    if history is None:
        return Card(run, run.problem or "waiting for a run in this directory", "failed" if run.problem else "waiting")
    pace = measure(history.records, history.config.epochs, history.session_start)
    percent, facts = int(100 * pace.fraction) if history.records else None, _facts(history, pace)
    since = f", last log line {_ago(age)}" if age is not None and history.records else ""
    if history.status == "finished":
        early = f" early: {printable(history.result['stop_reason'], 500)}" if history.result.get("stopped_early") else ""
        return Card(run, f"finished{early}", "finished", 100, facts)
    if history.status == "running":
        quiet = since if age is not None and age > QUIET_SECONDS else ""
        return Card(run, f"training{quiet}" if history.records else "starting", "running", percent, facts)
    if history.status == "unknown":
        return Card(run, f"not running here{since}", "unknown", percent, facts)
    text = f": {printable(history.events[-1]['text'], 500)}" if history.status == FAILED else ""
    status = "killed, or its process was lost" if history.status == "killed" else history.status
    return Card(run, f"{status}{since}{text}", history.status, percent, facts, _how_to_continue(history))


def _how_to_continue(history: History) -> str:
    """Where a run continues from, and the command, as HTML."""
    saved = escape(f"from {history.as_of}") if history.as_of else "from its beginning, as it has saved no checkpoint"
    if SOURCES[history.config.data.source].from_python:
        return f"To continue {saved}, repeat the call."
    values = flatten(dataclasses.asdict(history.config))
    own_parts = any(values[table.field] not in (*table.builtin, None) for table in (*REGISTRIES, SOURCES, METRICS))
    callbacks = any(event["event"] == START and event["text"] for event in history.events)  # their names
    if is_url(history.workdir) or own_parts or callbacks:  # which config.json does not have
        return f"To continue {saved}, repeat its command."
    directory = printable(os.path.abspath(history.workdir), 4096)
    words = ["jaxdp", "train", "--config", f"{directory}/{CONFIG}", "--workdir", directory]
    command = " ".join(f"<span>{escape(shlex.quote(word))}</span>" for word in words)  # each word breaks as a whole
    return f"To continue {saved}, repeat its command, or: <code>{command}</code>"


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
    facts = {"epoch": history.epochs_text()}
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
        name = history.config.first_metric
        last, best = evaluations[-1].get(name), best_evaluation(evaluations, name)
        better = f", best {METRICS[name].shown(best[name])}" if best and best[name] != last else ""
        facts[f"held-out {title_of(name).removeprefix('held-out ')}"] = METRICS[name].shown(last) + better
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
    if history.lost:
        facts["lost log lines"] = f"{history.lost:,}"
    return facts


def swatch(line: dict[str, Any] | None) -> str:
    """A run's line in the plots; "" for a run that is not in them."""
    if line is None:
        return ""
    path = f'<path d="M0 5H34" stroke="{line["color"]}" stroke-width="4" stroke-dasharray="{DASHES[line["dash"]]}"/>'
    return f'<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true">{path}</svg>'


def text_html(text: str) -> str:
    """Text as HTML, whose flags do not break at their hyphens."""
    return re.sub(r"(?<![\w-])--\w[\w.-]*\b", r"<code><span>\g<0></span></code>", escape(text))


def cards_html(cards: Sequence[Card], lines: Sequence[dict[str, Any]]) -> str:
    """A card for each run. lines: see `plots.data`."""
    articles, by_label = [], {line["label"]: line for line in lines}
    for number, one in enumerate(cards, 1):
        parts = [f'<h3 id="run-{number}">{swatch(by_label.get(one.run.label))} {escape(one.run.label)}</h3>']
        parts.append(f'<p class="status">{text_html(printable_lines(one.status))}</p>')
        if one.hint:
            parts.append(f"<p>{one.hint}</p>")
        if one.percent is not None and one.kind != "finished":
            bar = f'<progress max="100" value="{one.percent}" aria-labelledby="run-{number}">{one.percent} %</progress>'
            parts.append(f'<p class="bar">{bar} {one.percent} %</p>')
        values = [(label, value.replace(" %", "\N{NO-BREAK SPACE}%")) for label, value in (one.facts or {}).items()]
        facts = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in values)
        articles.append(
            f'<article class="{one.kind}" aria-labelledby="run-{number}">{"".join(parts)}<dl>{facts}</dl></article>'
        )
    return f'<div class="cards">{"".join(articles)}</div>'


def messages_html(runs: Sequence[Seen]) -> str:
    """The last messages of every run, warnings among them, the newest first; of those that differ in numbers, the newest.

    Where a session began or ended is no such number. "" without a message.
    """
    parts = []
    for run in runs:
        if run.history is None:
            continue
        alike: dict[str, list[dict[str, Any]]] = {}
        for event in reversed(run.history.events):
            if event["event"] in (MESSAGE, STOPPED, FAILED):
                text = event["text"]
                is_position = event["event"] != MESSAGE or text.startswith(RESUMING)
                alike.setdefault(text if is_position else re.sub(r"\d+", "0", text), []).append(event)
        if len(runs) > 1 and alike:
            parts.append(f"<h3>{escape(run.label)}</h3>")
        rows = [_message_html(events[0], len(events)) for events in alike.values()]
        parts.append(f"<ul>{''.join(rows[:MAX_MESSAGES])}</ul>" if rows else "")
        if len(rows) > MAX_MESSAGES:
            events = printable(f"{run.history.workdir}/{EVENTS}", 4096)
            parts.append(f'<p class="quiet">Earlier messages are in {escape(events)}.</p>')
    return "".join(parts)


def _message_html(event: dict[str, Any], times: int) -> str:
    seconds = event.get("wall_seconds")
    after = "" if seconds is None else f'<span class="quiet">after {format_duration(min(seconds, 1e9))}:</span> '
    text = text_html(printable_lines(event["text"][:MAX_CHARACTERS]))
    repeated = f' <span class="quiet">({times} times)</span>' if times > 1 else ""
    return f"<li>{after}{text}{repeated}</li>"
