"""What the viewers of `jaxdp watch` see: the runs, read again when they change, and the blocks of the page made of them.

Nothing is read or drawn unless somebody asks, and only once for all who ask at the same time.
"""

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from jaxdp.errors import first_line, printable
from jaxdp.report import plots
from jaxdp.report.page import draw
from jaxdp.report.run_history import History, labels_of
from jaxdp.watch import page
from jaxdp.watch.page import Block
from jaxdp.watch.runs import WatchedRun

SCAN_SECONDS = 1.0  # least time between two looks at the directories
# Figures take a second or two to draw: at most every ten seconds, and a twentieth of the time of one core.
DRAW_SECONDS, DRAW_SHARE = 10.0, 0.05
MAX_PICTURES = 24  # that are kept, so that a slow viewer still finds those of its page
NICE = 10  # of the thread that draws: training goes first


@dataclass(frozen=True)
class View:
    """The page at a moment. title: of the window; announcement: for screen readers."""

    title: str
    announcement: str
    blocks: dict[str, Block]


class Board:
    """The runs in some directories. All methods may be called by many threads."""

    def __init__(self, workdirs: Sequence[str | Path]) -> None:
        names = [printable(label) for label in labels_of(workdirs)]
        self.runs = [WatchedRun(Path(os.path.abspath(path)), name) for path, name in zip(workdirs, names, strict=True)]
        self._lock = threading.Lock()
        self._scanned = self._drawn_at = float("-inf")
        self._view: View | None = None
        self._details: dict[str, Block] = {}
        self._pictures: dict[str, bytes] = {}
        self._drawn_changes: tuple[int, ...] = ()
        self._drawn_states: tuple = ()
        self._draw_pause = 0.0
        self._drawing = False

    def view(self) -> View:
        """The page now."""
        with self._lock:
            if self._view is None or time.monotonic() - self._scanned >= SCAN_SECONDS:
                for run in self.runs:
                    run.refresh()
                self._start_drawing()
                self._view = self._make_view()
                self._scanned = time.monotonic()
            return self._view

    def picture(self, name: str) -> bytes | None:
        """The PNG of a figure on a recent page."""
        with self._lock:
            return self._pictures.get(name)

    def _make_view(self) -> View:
        cards = [page.card(run) for run in self.runs]
        styles = {run.label: style for run, style in plots.line_styles(self._histories())}
        blocks = {
            "progress": page.progress_block(cards, styles),
            "messages": page.messages_block(self.runs),
            "results": page.results_block(self._histories()),
        }
        percents = [f"{card.percent} %" for card in cards if card.kind == "running" and card.percent is not None]
        names = cards[0].run.label if len(cards) == 1 else f"{len(cards)} runs"
        title = " · ".join([", ".join(percents[:3])] * bool(percents) + [names, "jaxdp watch"])
        return View(title, "; ".join(card.announcement for card in cards), blocks | self._details)

    def _histories(self) -> list[History]:
        return [run.history for run in self.runs if run.history is not None]

    def _start_drawing(self) -> None:
        """Draw the figures in another thread, if they are out of date and have not just been drawn."""
        changes = tuple(run.changes for run in self.runs)
        states = tuple(run.history and run.history.status for run in self.runs)
        waits = time.monotonic() - self._drawn_at < self._draw_pause and states == self._drawn_states
        if self._drawing or changes == self._drawn_changes or waits:
            return
        self._drawing, self._drawn_changes, self._drawn_states = True, changes, states
        threading.Thread(target=self._draw, args=(self._histories(),), name="drawing", daemon=True).start()

    def _draw(self, histories: list[History]) -> None:
        started, details, pictures = time.monotonic(), {}, {}
        try:
            _yield_to_training()
            drawn, layers = draw(histories) if histories else ({}, {})
            sources = {}
            for name, data in drawn.items():
                digest = hashlib.blake2b(data, digest_size=8).hexdigest()
                pictures[digest], sources[Path(name).stem] = data, f"figures/{digest}.png"
            details = page.detail_blocks(histories, sources, {Path(name).stem: layer for name, layer in layers.items()})
        except Exception as error:  # the progress of the runs is still shown
            message = f"The curves could not be drawn ({type(error).__name__}: {first_line(error)})."
            details = {"curves": Block.of(f"<p>{escape(printable(message))}</p>")}
        finally:
            now = time.monotonic()
            with self._lock:
                self._details = details or self._details
                for digest in pictures:
                    self._pictures.pop(digest, None)  # to the end, as the newest
                self._pictures |= pictures
                while len(self._pictures) > MAX_PICTURES:
                    del self._pictures[next(iter(self._pictures))]
                self._drawn_at, self._draw_pause = now, max(DRAW_SECONDS, (now - started) / DRAW_SHARE)
                self._drawing, self._scanned = False, float("-inf")


def _yield_to_training() -> None:
    """Give this thread a low priority; Linux has priorities of threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
