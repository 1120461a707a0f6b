"""What `jaxdp watch` serves: the page of runs, read again when they change, and made only when somebody asks for it."""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from jaxdp.errors import ConfigError, first_line
from jaxdp.files import CONFIG
from jaxdp.report import page, plots
from jaxdp.report.cards import Seen
from jaxdp.report.run_history import History, labels_of, read_directory
from jaxdp.run_records import EVENTS, LOG
from jaxdp.setup.run_dir import CHECKPOINTS, RESULT, in_use

SCRIPTS = '<script src="page.js"></script>'
SOURCES = (CONFIG, LOG, RESULT, EVENTS, CHECKPOINTS)
LEAST_SECONDS, SHARE = 1.0, 0.05  # between two readings; of the time of one core that they may take
UNLOCKED_GROWTH_SECONDS = 120.0  # a log that grows without a lock is of another machine: how long it then may pause


class WatchedRun:
    """A run, updated by `refresh`. history, problem: see `Seen`."""

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self.history: History | None = None
        self.problem: str | None = None
        self._seen: tuple = ()
        self._grew = float("-inf")

    def refresh(self) -> None:
        """Read the run again if its files have changed, or could not be read. Raises nothing."""
        files = tuple(map(self._identity, SOURCES))
        log, before = files[1], self._seen[1] if self._seen else None
        locked = in_use(self.path)
        if log and before and log[0] == before[0] and log[1] > before[1] and not locked and not self._seen[-1]:
            self._grew = time.monotonic()
        running = files[2] is None and (locked or time.monotonic() - self._grew < UNLOCKED_GROWTH_SECONDS)
        seen = (*files, running, locked)
        if seen != self._seen or self.problem is not None:  # a problem may have been of the moment
            self._seen, self.history, self.problem = seen, None, None
            if files[0] is not None:
                self._read(running)

    def _read(self, running: bool) -> None:
        try:
            self.history = read_directory(self.path, self.label, is_running=running)
        except ConfigError as error:
            self.problem = error.reason
        except Exception as error:  # whatever this directory holds, the page shows the other runs
            self.problem = f"cannot be read ({getattr(error, 'strerror', None) or type(error).__name__})"

    def _identity(self, name: str) -> tuple[int, int, int] | None:
        """Identity, size and time of a file that the state depends on; None for a missing one."""
        try:
            status = os.stat(self.path / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # such as a missing permission; `_read` finds it too
            return (0, 0, error.errno or 0)
        return (status.st_ino, status.st_size, status.st_mtime_ns)

    def seen(self) -> Seen:
        """With the seconds since the log was written, which are only shown: both clocks can be set."""
        with contextlib.suppress(OSError):
            return Seen(self.label, self.history, self.problem, max(0.0, time.time() - os.stat(self.path / LOG).st_mtime))
        return Seen(self.label, self.history, self.problem)


class RunsPage:
    """The page of the runs in some directories. All methods may be called by many threads."""

    def __init__(self, workdirs: Sequence[str | Path]) -> None:
        labels = labels_of(workdirs)
        self.runs = [WatchedRun(Path(os.path.abspath(path)), label) for path, label in zip(workdirs, labels, strict=True)]
        self._lock = threading.Lock()
        self._page = ""
        self._next_look = float("-inf")

    def page(self) -> str:
        """The page now."""
        with self._lock:
            began = time.monotonic()
            if began >= self._next_look:
                for run in self.runs:
                    run.refresh()
                self._make_page()
                now = time.monotonic()
                self._next_look = now + max(LEAST_SECONDS, (now - began) / SHARE)  # training needs the processor too
            return self._page

    def _make_page(self) -> None:
        """Make the page. After an error, the last page is shown, with the error at its end."""
        try:
            histories = [run.history for run in self.runs if run.history is not None]
            self._page = page.page([run.seen() for run in self.runs], plots.data(histories), SCRIPTS, follows=True)
        except Exception as error:  # any content of a log: the server continues
            problem = f"The page could not be made ({type(error).__name__}: {first_line(error)})."
            if not self._page:
                unknown = [Seen(run.label, None, "cannot be shown") for run in self.runs]
                self._page = page.page(unknown, plots.data([]), SCRIPTS, follows=True)
            self._page = page.with_foot(self._page, problem)
