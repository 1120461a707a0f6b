"""The state of a run that is watched, read from its directory, which is only read."""

import os
import time
from pathlib import Path
from typing import Any

from jaxdp.errors import ConfigError
from jaxdp.files import CONFIG
from jaxdp.records import ENDS, EVENTS, LOG, START, read_events
from jaxdp.report.run_files import local_run_files
from jaxdp.report.run_history import History, assemble
from jaxdp.setup.run_dir import CHECKPOINTS, RESULT, in_use, run_config
from jaxdp.watch.log_age import seconds_since_written
from jaxdp.watch.log_reader import LogReader

SOURCES = (CONFIG, LOG, RESULT, EVENTS, CHECKPOINTS)
UNLOCKED_GROWTH_SECONDS = 120.0  # a log that grows without a lock is of another machine: how long it then may pause


class WatchedRun:
    """A run, updated by `refresh`.

    history: None if there is no run, or if it cannot be read. problem: why it cannot be read, else None. events: see
    `read_events`. changes: increases when anything of this changes.
    """

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self.history: History | None = None
        self.problem: str | None = None
        self.events: list[dict[str, Any]] = []
        self.changes = 0
        self._log = LogReader(path / LOG)
        self._seen: tuple | None = None
        self._was_locked, self._grew_without_lock = True, float("-inf")

    @property
    def session_start(self) -> int:
        """Samples at the start of the last session that trained; 0 if unknown."""
        return int(next((event.get("samples", 0) for event in reversed(self.events) if event["event"] == START), 0))

    @property
    def end(self) -> dict[str, Any] | None:
        """The event with which the last session ended; None if it trains, or was killed."""
        return self.events[-1] if self.events and self.events[-1]["event"] in ENDS else None

    @property
    def log_age(self) -> float | None:
        """Seconds since the log was written; None without a log."""
        return seconds_since_written(self.path / LOG)

    def refresh(self) -> None:
        """Look at the directory, and read what has changed. Raises nothing."""
        signature, before = self._signature(), self._seen
        log, earlier_log = signature[1], before and before[1]
        grew = log is not None and earlier_log is not None and log[0] == earlier_log[0] and log[1] > earlier_log[1]
        running = self._is_running(grew=grew, has_result=signature[2] is not None)
        seen, problem = (*signature, running), self.problem
        if seen == before and problem is None:  # a problem may have been of the moment
            return
        self._read(is_run=signature[0] is not None, running=running)
        if seen != before or self.problem != problem:
            self.changes += 1
        self._seen = seen

    def _read(self, *, is_run: bool, running: bool) -> None:
        self.history, self.problem = None, None
        if not is_run:
            self._log, self.events = LogReader(self.path / LOG), []
            return
        try:
            self._log.refresh()
            self.events = read_events(self.path / EVENTS)
            files = local_run_files(self.path, is_running=running)
            self.history = assemble(
                files, self.label, config=run_config(self.path), records=[*self._log.records], damaged=self._log.damaged
            )
        except ConfigError as error:
            self.problem = error.reason
        except Exception as error:  # whatever this directory holds, the page shows the other runs
            self.problem = f"cannot be read ({getattr(error, 'strerror', None) or type(error).__name__})"

    def _signature(self) -> tuple:
        """Identity, size and time of every file that the state depends on; None for a missing one."""
        states: list[tuple[int, int, int] | None] = []
        for name in SOURCES:
            try:
                status = os.stat(self.path / name)
                states.append((status.st_ino, status.st_size, status.st_mtime_ns))
            except (FileNotFoundError, NotADirectoryError):
                states.append(None)
            except OSError as error:  # such as a missing permission; `_read` finds it too
                states.append((0, 0, error.errno or 0))
        return tuple(states)

    def _is_running(self, *, grew: bool, has_result: bool) -> bool:
        """Whether a process trains in the directory: it holds the lock, or, out of sight on another machine, the log grows."""
        locked = not has_result and in_use(self.path)
        if grew and not locked and not self._was_locked:
            self._grew_without_lock = time.monotonic()
        self._was_locked = locked
        return locked or (not has_result and time.monotonic() - self._grew_without_lock < UNLOCKED_GROWTH_SECONDS)
