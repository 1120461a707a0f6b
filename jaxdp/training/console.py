"""What a person sees of a run: a progress bar in a terminal, plain lines where there is none."""

import os
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

PLAIN_SECONDS = 15.0  # between lines where stdout is no terminal
PLAIN_WIDTH = 128


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def of_step(record: dict) -> str:
    """A step's record in words."""
    text = (
        f"epoch {record['epoch']:.1f}  loss {record['loss']:.3f}  {record['images_per_second']:.0f} img/s  "
        f"lr {record['learning_rate']:.3g}  phase {record['phase']} batch {record['global_batch']}"
    )
    return text + (f"  skipped {record['skipped_steps']}" if record.get("skipped_steps") else "")


class Quiet:
    """Shows nothing: the twin of `Screen` for tests and programs. again: how a person goes on with a run that was stopped."""

    again = "the same command"

    def say(self, text):
        pass

    def table(self, table):
        pass

    def begin(self, total_steps, done=0):
        pass

    def busy(self, what):
        pass

    def step(self, record):
        pass

    def evaluated(self, record):
        pass

    def end(self):
        pass

    def picture(self, path):
        pass


class Screen:
    """A run on stdout, or on another stream."""

    again = "the same command"

    def __init__(self, stream=None):
        stream = stream or sys.stdout
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.console = Console(file=stream, highlight=False, soft_wrap=True, width=None if self.live else PLAIN_WIDTH)
        self.progress = None
        self.last_line = 0.0
        self.first_step = None

    def say(self, text):
        self.console.print(text, markup=False)

    def table(self, table: Table):
        """A table; its title and caption are lines of their own, which it would break to its own width."""
        title, table.title, caption, table.caption = table.title, None, table.caption, None
        for column in table.columns:
            column.overflow = "fold"  # rich would cut numbers short in a narrow terminal
        if title:
            self.say(title)
        with self.console.capture() as shown:
            self.console.print(table, soft_wrap=False)
        self.say("\n".join(line.rstrip() for line in shown.get().splitlines()))
        if caption:
            self.say(caption)

    def begin(self, total_steps, done=0):
        self.total_steps = total_steps
        if self.live:
            bar = [BarColumn(bar_width=20)] if self.console.width >= 110 else []
            text = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # what a narrow terminal cuts, from its end
            self.progress = Progress(
                *bar,
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                TimeElapsedColumn(table_column=Column(no_wrap=True)),
                TextColumn("eta", table_column=Column(no_wrap=True)),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
                TextColumn("{task.description}", table_column=text),
                console=self.console,
                expand=True,
                speed_estimate_period=120,
            )
            self.task = self.progress.add_task("starting", total=total_steps, completed=done)
            self.progress.start()

    def busy(self, what):
        if self.progress is not None:
            self.progress.update(self.task, description=what)
        elif self.first_step is None:
            self.say(f"{what} ...")

    def step(self, record):
        now = time.monotonic()
        if self.first_step is None:
            self.first_step = (now, record["step"])
        text = of_step(record)
        if self.live:
            self.progress.update(self.task, completed=record["step"], description=text)
        elif now - self.last_line >= PLAIN_SECONDS:
            self.last_line = now
            self.say(f"step {record['step']}/{self.total_steps}  {text}{self._eta(record, now)}")

    def _eta(self, record, now) -> str:
        then, first = self.first_step
        left = (self.total_steps - record["step"]) * (now - then) / max(1, record["step"] - first)
        return f"  eta {clock(left)}" if record["step"] > first else ""

    def evaluated(self, record):
        self.say(
            f"epoch {record['epoch']:.1f}: held-out accuracy {100 * record['eval_accuracy']:.2f} %  "
            f"top-5 {100 * record['eval_top5']:.2f} %  loss {record['eval_loss']:.4f}  "
            f"({record['eval_examples']} images)"
        )

    def end(self):
        if self.progress is not None:
            self.progress.update(self.task, description="")
            self.progress.stop()
            self.progress = None

    def picture(self, path):
        """A picture that the run has drawn; nothing is shown where only text can be."""
