"""A run in a notebook: a progress bar that is updated in place, tables as text, the training picture inline."""

import base64
import html
import sys
import time

from rich.console import Console

from jaxdp.training.console import Quiet, Screen, clock, of_step

UPDATE_SECONDS = 0.33  # between changes of the progress bar
WIDTH = 110  # of tables, in characters
PICTURE_WIDTH = 760  # in pixels


def screen_here() -> Quiet | Screen:
    """A `Notebook` where the caller runs in an IPython kernel, else `Quiet`. IPython is never imported, only found."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return Quiet() if getattr(shell, "kernel", None) is None else Notebook()


class Notebook(Screen):
    """A run in the output of a cell; a stored notebook keeps the last state of the bar alone."""

    again = "running this cell again"

    def __init__(self):
        self.live = False
        self.console = Console(
            force_terminal=False, force_jupyter=False, color_system=None, width=WIDTH, highlight=False, soft_wrap=True
        )
        self.bar = self.total_steps = self.first_step = None
        self.last_change, self.last_text, self.done, self.ended = 0.0, "", 0, False

    def begin(self, total_steps, done=0):
        self.total_steps, self.done, self.began = total_steps, done, time.monotonic()
        self._change("starting", at_once=True)

    def busy(self, what):
        self._change(f"{what} ...", at_once=self.bar is None)

    def step(self, record):
        now = time.monotonic()
        if self.first_step is None:
            self.first_step = (now, record["step"])
        self.done, self.last_text = record["step"], of_step(record)
        self._change(f"{self.last_text}{self._eta(record, now)}")

    def end(self):
        if self.bar is None or self.ended:
            return
        self.ended = True
        if self.total_steps is None:
            self._change("stopped before the first step", at_once=True)
            return
        what = "done" if self.done >= self.total_steps else "stopped"
        text = f"  {self.last_text}" if self.last_text else ""
        self._change(f"{what} after {clock(time.monotonic() - self.began)}{text}", at_once=True)

    def picture(self, path):
        data = {"image/png": base64.b64encode(path.read_bytes()).decode(), "text/plain": f"<{path.name}>"}
        self._display()(data, metadata={"image/png": {"width": PICTURE_WIDTH}}, raw=True)

    def _change(self, text: str, at_once: bool = False) -> None:
        """Show the bar with this text, unless it has just been changed."""
        now = time.monotonic()
        if not at_once and now - self.last_change < UPDATE_SECONDS:
            return
        self.last_change = now
        counted = "" if self.total_steps is None else f"step {self.done}/{self.total_steps}  "
        bar = f'<progress value="{self.done}" max="{self.total_steps}"></progress> ' if counted else ""
        data = {"text/plain": counted + text, "text/html": f"{bar}<code>{html.escape(counted + text)}</code>"}
        if self.bar is None:
            self.bar = self._display()(data, raw=True, display_id=True)
        else:
            self.bar.update(data, raw=True)

    def _display(self):
        from IPython.display import display

        return display
