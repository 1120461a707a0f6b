"""Notebook output of a run: a progress bar updated in place, tables as text, the training plot inline."""

import base64
import html
import io
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxdp.errors import in_notebook
from jaxdp.loggers.console import Screen, format_duration, format_step

UPDATE_SECONDS = 0.33  # minimum time between updates of the progress bar
WIDTH = 110  # of tables, in characters
IMAGE_WIDTH = 760  # in pixels


def default_screen() -> Screen:
    """`Notebook` in an IPython kernel; `Screen` elsewhere, or if stdout is redirected to memory. Does not import IPython."""
    if isinstance(sys.stdout, io.StringIO):
        return Screen()
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return Screen() if getattr(shell, "kernel", None) is None else Notebook()


class Notebook(Screen):
    """Shows a run in the output of a cell. A saved notebook contains the final state of the progress bar."""

    resume_action = "running this cell again"

    def __init__(self) -> None:
        super().__init__()
        self.live = False
        self.console = Console(
            force_terminal=False, force_jupyter=False, color_system=None, width=WIDTH, highlight=False, soft_wrap=True
        )
        self.bar: Any = None
        self.started = self.last_update = 0.0
        self.last_text = ""
        self.done = 0
        self.has_begun = self.has_ended = False

    def info(self, text: str) -> None:
        super().info(in_notebook(text))

    def begin(self, total_steps: int, done: int = 0) -> None:
        self.total_steps, self.done, self.started, self.has_begun = total_steps, done, time.monotonic(), True
        self._update("starting", force=True)

    def status(self, text: str) -> None:
        self._update(f"{text} ...", force=self.bar is None)

    def step(self, record: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if self.first_step is None:
            self.first_step = (now, record["step"])
        self.done, self.last_text = record["step"], format_step(record)
        self._update(f"{self.last_text}{self._eta(record['step'], now)}")

    def end(self) -> None:
        if self.bar is None or self.has_ended:
            return
        self.has_ended = True
        if not self.has_begun:
            self._update("stopped before the first step", force=True)
            return
        outcome = "done" if self.done >= self.total_steps else "stopped"
        text = f"  {self.last_text}" if self.last_text else ""
        self._update(f"{outcome} after {format_duration(time.monotonic() - self.started)}{text}", force=True)

    def image(self, path: Path) -> None:
        data = {"image/png": base64.b64encode(path.read_bytes()).decode(), "text/plain": f"<{path.name}>"}
        _display()(data, metadata={"image/png": {"width": IMAGE_WIDTH}}, raw=True)

    def _update(self, text: str, *, force: bool = False) -> None:
        """Show the bar with this text. Without `force`, skip the update if the last one was less than UPDATE_SECONDS ago."""
        now = time.monotonic()
        if not force and now - self.last_update < UPDATE_SECONDS:
            return
        self.last_update = now
        count = f"step {self.done}/{self.total_steps}  " if self.has_begun else ""
        bar = f'<progress value="{self.done}" max="{self.total_steps}"></progress> ' if count else ""
        data = {"text/plain": count + text, "text/html": f"{bar}<code>{html.escape(count + text)}</code>"}
        if self.bar is None:
            self.bar = _display()(data, raw=True, display_id=True)
        else:
            self.bar.update(data, raw=True)


def _display() -> Callable[..., Any]:
    from IPython.display import display

    return display
