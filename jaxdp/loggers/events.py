"""Events of a run besides its metrics: when its sessions began, what they showed, and how they ended.

They are lines of `events.jsonl`, for people and for `jaxdp watch`. A resumed run appends to this file, and reads how often the
run was started.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxdp.errors import first_line
from jaxdp.files import open_regular
from jaxdp.run_records import EVENTS, FAILED, FINISHED, MESSAGE, START, STOPPED
from jaxdp.training.callback import Callback
from jaxdp.training.run import Run


class EventLog(Callback):
    """Appends events to the events.jsonl in a directory, or nowhere if that is None. An event that cannot be written is lost
    without an error.

    position: called at every event; returns the fields `samples`, `sessions` and `wall_seconds` if they are known.
    """

    def __init__(self, workdir: Path | None) -> None:
        self.position: Callable[[], dict[str, Any]] = dict
        self._file: IO[bytes] | None = None
        self._separator = b""
        if workdir is None:
            return
        with contextlib.suppress(OSError):
            self._file = open_regular(workdir / EVENTS, "ab")
            self._separator = b"\n" * (os.fstat(self._file.fileno()).st_size > 0)  # the last line may be torn

    def on_start(self, run: Run) -> None:
        self.write(START, ", ".join(type(callback).__name__ for callback in run.callbacks.users))

    def recorded(self, info: Callable[[str], Any]) -> Callable[[str], None]:
        """A function that passes a line to `info` and records it."""

        def show(text: str) -> None:
            info(text)
            self.write(MESSAGE, text)

        return show

    def write(self, event: str, text: str = "") -> None:
        """Append an event. text: for people."""
        if self._file is None or self._file.closed:
            return
        fields = {"event": event, **self.position(), "host": socket.gethostname(), "text": text}
        line = self._separator + json.dumps(fields).encode() + b"\n"
        written = 0
        with contextlib.suppress(OSError):
            written = self._file.write(line)
        self._separator = b"" if written == len(line) else b"\n"

    @contextlib.contextmanager
    def session(self, stopped: type[BaseException]) -> Iterator[None]:
        """Record how the block ends, then close the file. stopped: exception of a run that was stopped and saved."""
        try:
            yield
            self.write(FINISHED)
        except BaseException as error:
            self.write(STOPPED if isinstance(error, stopped) else FAILED, first_line(error))
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Close the file; later events are lost."""
        if self._file is not None:
            self._file.close()
