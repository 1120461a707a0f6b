"""Terminal output of a run: a progress bar on a terminal, plain lines elsewhere."""

import io
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from jaxdp import metrics
from jaxdp.errors import plural, print_safe, printable_lines
from jaxdp.files import discard_output

PRINT_SECONDS = 15.0  # least time between printed step lines without a terminal: a log stays short
BAR_COLUMNS = 110  # narrowest terminal that shows the bar itself


def format_duration(seconds: float) -> str:
    """Seconds as M:SS or H:MM:SS."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def format_step(record: Mapping[str, Any]) -> str:
    """A step's record as one line, without the step number."""
    text = (
        f"epoch {record['epoch']:.1f}  training loss {record['loss']:.3f}  {record['images_per_second']:.0f} img/s  "
        f"lr {record['learning_rate']:.3g}  phase {record['phase']} batch {record['global_batch']}"
    )
    return text + (f"  skipped {record['skipped_steps']}" if record.get("skipped_steps") else "")


def _is_interactive(stream: TextIO) -> bool:
    """Whether a stream is the terminal that controls this process.

    A launcher such as Open MPI's mpirun may give a process a pseudo-terminal and write its output to a file. That terminal does
    not control the process.
    """
    if not stream.isatty():
        return False
    try:
        os.tcgetpgrp(stream.fileno())
    except io.UnsupportedOperation:  # not a file: the stream of a notebook, whose isatty() is true
        return True
    except OSError:
        return False
    return True


def _printable(table: Table) -> Table:
    """A table without frame, title, caption and markup; its cells may quote untrusted text."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=table.show_header)
    for column in table.columns:
        shown.add_column(column.header, justify=column.justify, overflow="fold")
    for row in zip(*(column.cells for column in table.columns), strict=True):
        shown.add_row(*(Text(printable_lines(cell), cell.style if isinstance(cell, Text) else "") for cell in row))
    return shown


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave the error to the caller: rich would exit."""
        raise cast(BaseException, sys.exception())


class _LastingStream:
    """A stream that passes its write errors to a function."""

    def __init__(self, stream: Any, on_error: Callable[[OSError], None]) -> None:
        self._stream, self._on_error = stream, on_error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._on_error(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._on_error(error)


class Screen:
    """Shows a run on stdout or another text stream; nothing if it is quiet.

    resume_action: what resumes a run that was stopped, as the subject of a sentence. lost: a line that says why nothing is
    shown any more; None while all is shown.
    """

    resume_action = "the same command"
    lost: str | None = None

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        stream = stream or sys.stdout
        self.live = not quiet and _is_interactive(stream) and os.environ.get("TERM") != "dumb"
        self.console: Console = _Console(
            file=stream,
            quiet=quiet,
            highlight=False,
            soft_wrap=True,
            width=None if self.live else sys.maxsize,
            force_terminal=None if self.live else False,  # a launcher's pseudo-terminal may end in a file: no colors
        )
        self.progress: Progress | None = None
        self.task = TaskID(0)
        self.total_steps = 0
        self._tell_lost: Callable[[str], Any] = lambda line: None
        self.last_line = -math.inf  # monotonic time of the last step line
        self.first_step: tuple[float, int] | None = None  # monotonic time and number of this session's first step

    def outlast_reader(self) -> None:
        """From now on, show nothing and raise no error once the output cannot be written, as after `| head`."""
        if self.lost is None and not isinstance(self.console.file, _LastingStream):
            self.console.file = cast(IO[str], _LastingStream(self.console.file, partial(self._lose, sys.stderr)))

    def _lose(self, errors: TextIO, error: OSError) -> None:
        """Report once on stderr that the output cannot be written. errors: stderr, which a progress bar replaces meanwhile."""
        if self.lost is not None:
            return
        self.lost = discard_output(self.console.file, error)
        self._tell_lost(self.lost)
        try:
            print_safe(f"jaxdp: {self.lost}", errors)
        except OSError as stderr_error:  # `2>&1 | head`
            discard_output(errors, stderr_error)

    def when_lost(self, tell: Callable[[str], Any]) -> None:
        """Call a function with `lost` once nothing is shown any more."""
        self._tell_lost = tell
        if self.lost is not None:
            tell(self.lost)

    def info(self, text: str) -> None:
        """Print a message."""
        text = printable_lines(text)  # a terminal itself would break lines inside words
        self.console.print(text, markup=False, emoji=False, soft_wrap=not self.live)

    def table(self, table: Table) -> None:
        """Print a table: in a terminal as wide as it; elsewhere each row is one line.

        Title and caption are separate lines, because rich would wrap them to the table's width.
        """
        if table.title:
            self.info(str(table.title))
        for segments in self.console.render_lines(_printable(table), pad=False):
            line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
            line.rstrip()
            self.console.print(line)
        if table.caption:
            self.info(str(table.caption))

    def begin(self, total_steps: int, done: int = 0) -> None:
        """Start the progress display. done: steps of earlier sessions."""
        self.total_steps = total_steps
        if self.live:
            bar = [BarColumn(bar_width=20)] if self.console.width >= BAR_COLUMNS else []
            text = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # a narrow terminal truncates this column
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

    def status(self, text: str) -> None:
        """Show the current activity, such as "compiling"."""
        if self.progress is not None:
            self.progress.update(self.task, description=text)
        elif self.first_step is None:
            self.info(f"{text} ...")

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a step's record."""
        now = time.monotonic()
        if self.first_step is None:
            self.first_step = (now, record["step"])
        if self.progress is not None:
            self.progress.update(self.task, completed=record["step"], description=format_step(record))
        elif now - self.last_line >= PRINT_SECONDS:
            self.last_line = now
            self.info(f"step {record['step']}/{self.total_steps}  {format_step(record)}{self._eta(record['step'], now)}")

    def _eta(self, step: int, now: float) -> str:
        """Text such as "  eta M:SS" by the mean step time of this session; "" after the first step."""
        if self.first_step is None or step <= self.first_step[1]:
            return ""
        started, first = self.first_step
        seconds = (self.total_steps - step) * (now - started) / (step - first)
        return f"  eta {format_duration(seconds)}"

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Print an evaluation's record."""
        shown = "  ".join(metrics.words(record)).removeprefix("held-out ")
        self.info(f"epoch {record['epoch']:.1f}: held-out {shown}  ({plural(record[metrics.COUNT], 'image')})")

    def image(self, path: Path) -> None:
        """Show an image file, if the screen can show images."""

    def end(self) -> None:
        """Stop the progress display."""
        if self.progress is not None:
            self.progress.update(self.task, description="")
            self.progress.stop()
            self.progress = None
