"""What the processes of a run do, and the status files that report it.

Each process writes its status to processes/RANK.json of the run. Rank 0 reads all files and decides which process has failed
(see `jaxdp.distributed.verdict`); other ranks read the verdict in rank 0's file. A count that changes shows that a process is
alive. Time stamps of different hosts are never compared.
"""

import errno
import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

from jaxdp.distributed import stack_traces
from jaxdp.distributed.stragglers import StepTimes
from jaxdp.errors import EXIT_FAILURE, EXIT_STOPPED, first_line

FOLDER = "processes"
LARGEST = 2**26  # bytes of a file
REASON_CHARS = 4096
NO_STEPS = StepTimes()
OUTSIDE = "outside"  # the activity before, between and after runs
PHRASES = {  # activity -> where a process is, in a message
    "start": "during start-up",
    "load": "while loading",
    "compile": "during compilation",
    "step": "during a step",
    "audit": "during an audit",
    "evaluate": "during evaluation",
    "save": "while saving",
    "finish": "while finishing",
    OUTSIDE: "outside of a run",
}
# What a thread waits for: a thread that loads, prepares or compiles, devices, or other processes.
THREAD, DEVICES, OTHER_RANKS = "another thread", "devices", "other ranks"
# Or the save, the compiler, or a callback of a compiled program: by the name of the thread that executes it.
SAVE, COMPILER, CALLBACK = "checkpoint_", "compile_", stack_traces.NATIVE
KEPT_DURATIONS, MIN_DURATIONS = 20, 5  # iterations whose duration is kept, and how many define a typical one
ITERATION_OF_ACTIVITY = {"load": "step", "step": "step", "audit": "step", "evaluate": "evaluate"}
Result = TypeVar("Result")


@dataclass(frozen=True)
class Heartbeat:
    """What a process does at one moment.

    activity, step, detail, position, background_save: see `ProcessStatus`. idle_seconds: time without progress.
    typical_seconds: median duration of recent iterations, None if unknown. longest_seconds: longest recent iteration.
    save_seconds: how long the background save has taken; longest_save_seconds: longest recent one. waits: what the training
    thread waits for in the end, "" if it executes code. save_waits: the same of the save, `SAVE` if it writes.
    """

    activity: str
    step: int | None = None
    detail: str = ""
    position: tuple[int, ...] = (0, 0, 0)
    idle_seconds: float = 0.0
    typical_seconds: float | None = None
    longest_seconds: float = 0.0
    background_save: str = ""
    save_seconds: float = 0.0
    longest_save_seconds: float = 0.0
    waits: str = ""
    save_waits: str = SAVE

    @property
    def work(self) -> str:
        """What its threads do: "code", "compiler", or "" if they wait for devices or other processes."""
        return {COMPILER: "compiler", DEVICES: "", OTHER_RANKS: ""}.get(self.waits, "code")

    @property
    def location(self) -> str:
        """Where the process is, in a message."""
        if self.activity == "step" and self.step is not None:
            where = f"in step {self.step}"
        else:
            where = PHRASES.get(self.activity, f"during {self.activity}")
            where += "" if self.step is None else f", step {self.step}"
        where += f", saving {self.background_save}" if self.background_save else ""
        return where + (f", {self.detail}" if self.detail else "")

    @property
    def is_first_step(self) -> bool:
        """Whether no step of this session has ended yet."""
        return self.activity == "step" and self.typical_seconds is None and not self.longest_seconds


class ProcessStatus:
    """Activity, step and progress of this process. No method takes a lock, so a stuck thread cannot block the watching thread.

    activity: what the process does now, a key of `PHRASES`. detail: what it does within the activity. position: (stops,
    barriers since the last stop, activities since the last barrier). All processes of a run count it alike, because they
    execute the same program: the process with the lower position is behind. background_save: what is being saved in the
    background, "" for nothing. training_thread: identity of the thread that trains. waits: what it waits for, by "", and what
    other threads wait for, by the first part of their name, such as "compile".
    Time is counted in ticks of one thread (see `tick`), so a process that was suspended and resumed does not count as idle.
    """

    def __init__(self) -> None:
        self.training_thread = threading.main_thread().ident
        self.activity = OUTSIDE
        self.step: int | None = None
        self.detail = ""
        self.background_save, self.save_started = "", 0.0
        self.position = (0, 0, 0)
        self.waits: dict[str, str] = {}
        self.clock = self.last_progress = 0.0
        self.iteration: tuple[str, float] | None = None  # name and start time of the current iteration
        self.durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_DURATIONS))

    def tick(self, seconds: float) -> None:
        """Advance the clock. Only one thread calls this, at regular intervals."""
        self.clock += seconds

    def record_progress(self) -> None:
        """Reset the time without progress."""
        self.last_progress = self.clock

    def set_activity(self, activity: str, step: int | None = None, detail: str = "") -> None:
        """Set what this process does now. step: its number; None keeps the previous one."""
        self.activity, self.detail = activity, detail
        self.step = self.step if step is None else step
        stops, barriers, activities = self.position
        self.position = stops, barriers, activities + 1
        if activity not in ITERATION_OF_ACTIVITY:
            self.iteration = None
        self.last_progress = self.clock

    def record_stop(self) -> None:
        """Record that all processes stop here: some wait at a barrier that the rest have not reached."""
        self.position = self.position[0] + 1, 0, 0

    def begin_iteration(self, name: str) -> None:
        """Begin a "step" or the evaluation ("evaluate") of one batch; keep the duration of a previous one of the same name."""
        now = time.monotonic()
        if self.iteration and self.iteration[0] == name:
            self.durations[name].append(now - self.iteration[1])
        self.iteration = name, now

    @contextmanager
    def performing(self, detail: str) -> Iterator[None]:
        """Report work that not every process does, such as writing the log. The position does not change."""
        before, self.detail = self.detail, detail
        self.record_progress()
        try:
            yield
        finally:
            self.detail = before
            self.record_progress()

    @contextmanager
    def at_barrier(self, name: str) -> Iterator[None]:
        """Wait for all processes at the same point of the program. Counts only in the thread that trains."""
        with self.waiting(OTHER_RANKS):
            if threading.get_ident() != self.training_thread:  # background saves synchronize in another thread
                yield
                return
            stops, barriers, _ = self.position
            self.position = stops, barriers + 1, 0
            with self.performing(f"waiting for {name}"):
                yield

    @contextmanager
    def waiting(self, waits: str) -> Iterator[None]:
        """Record what this thread waits for in a block, or a function, that calls no code of a user."""
        is_training = threading.get_ident() == self.training_thread
        thread = "" if is_training else threading.current_thread().name.partition("_")[0]
        before, self.waits[thread] = self.waits.get(thread, ""), waits
        try:
            yield
        finally:
            self.waits[thread] = before

    def _awaited(self) -> str:
        """What the training thread waits for; if it is a thread that waits itself, what this thread waits for."""
        waits, of_thread = self.waits.get("", ""), self.waits.get
        if waits == THREAD:  # beside a compilation, steps and evaluations wait for images
            waits = of_thread("prepare") or (self.activity not in ("load", "evaluate") and of_thread("compile")) or THREAD
        return (of_thread("checkpoint") or SAVE) if waits == SAVE else waits

    def set_background_save(self, name: str) -> None:
        """Set what is being saved in the background; "" when the save has ended."""
        if self.background_save:
            self.durations["save"].append(self.clock - self.save_started)
        self.background_save, self.save_started = name, self.clock

    def heartbeat(self) -> Heartbeat:
        iteration, save = ITERATION_OF_ACTIVITY.get(self.activity), self.background_save
        durations = list(self.durations[iteration]) if iteration else []
        return Heartbeat(
            activity=self.activity,
            step=self.step,
            detail=self.detail,
            position=self.position,
            idle_seconds=self.clock - self.last_progress,
            typical_seconds=median(durations) if len(durations) >= MIN_DURATIONS else None,
            longest_seconds=max(durations, default=0.0),
            background_save=save,
            save_seconds=self.clock - self.save_started if save else 0.0,
            longest_save_seconds=max(list(self.durations["save"]), default=0.0),
            waits=self._awaited(),
            save_waits=self.waits.get("checkpoint") or SAVE,
        )


_current = ProcessStatus()


def current() -> ProcessStatus:
    """The status of this process."""
    return _current


def result_of(future: Future[Result]) -> Result:
    """The result of a future, for which the training thread waits."""
    with _current.waiting(THREAD):
        return future.result()


@dataclass(frozen=True)
class Verdict:
    """Why a run ends. rank, host: of the process that failed; rank is None if it is not one. code: exit code of other ranks."""

    reason: str
    rank: int | None = None
    host: str = ""
    location: str = ""
    place: str = ""
    code: int = EXIT_FAILURE

    def __str__(self) -> str:
        """One line: the process that failed, what it did, why it failed, and the place in its code."""
        place = f"; {self.place}" if self.place and self.place not in self.reason else ""
        if self.rank is None:
            return self.reason + place
        verb = "was stopped" if self.code == EXIT_STOPPED else "failed"
        return f"rank {self.rank} on {self.host} {verb}{f' {self.location}' if self.location else ''}: {self.reason}{place}"


@dataclass(frozen=True)
class Failure:
    """What a process reports about its failure. collective: a collective has raised, maybe because another process failed.

    place: where the error was raised.
    """

    reason: str
    code: int = EXIT_FAILURE
    collective: bool = False
    place: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The failure for an exception, in one line."""
        code = getattr(error, "exit_code", EXIT_FAILURE)
        place = "" if code == EXIT_STOPPED else stack_traces.place_of(error)
        is_collective = "JaxRuntimeError" in (type(error).__name__, type(error.__cause__).__name__)  # maybe of a callback
        return cls(first_line(error)[:REASON_CHARS], code, is_collective, place)


@dataclass(frozen=True)
class Record:
    """What a process writes about itself.

    run: the coordinator's address, which distinguishes the files of different runs; "" for a single process. count: grows with
    every write. machine, pid: the process on its host. beat: what it does. place: the innermost frames of the thread that
    works. overdue: "late" or "stuck" after a longer time without progress than allowed.
    cut_off: whether rank 0's host did not answer when this process became overdue or its collective failed. stacks: lines, if
    it is overdue. write_seconds: how long the last write took. verdict, report: rank 0's (report: its number, and lines to
    print). left: the process ends, and needs nothing more from other processes. session: rank 0's random word for the values
    that the processes exchange, once all have started. stop_reason: why this process asks all to stop.
    step_times: see `StepTimes`.
    """

    run: str
    rank: int
    host: str
    machine: str
    pid: int
    count: int = 0
    beat: Heartbeat = Heartbeat("start")
    place: str = ""
    overdue: str = ""
    cut_off: bool = False
    stacks: tuple[str, ...] = ()
    write_seconds: float = 0.0
    failure: Failure | None = None
    verdict: Verdict | None = None
    report: tuple[int, tuple[str, ...]] = (0, ())
    left: bool = False
    session: str = ""
    stop_reason: str = ""
    step_times: StepTimes = NO_STEPS

    @property
    def process(self) -> tuple[str, int]:
        """Identifies the process: no other process has the same pair."""
        return self.machine, self.pid

    @property
    def seconds(self) -> float:
        """Time without progress; if the process is overdue, at least the time of its background save."""
        return max(self.beat.idle_seconds, self.beat.save_seconds if self.overdue else 0.0)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """Raises ValueError, TypeError or KeyError for text that is not a record."""
        fields: dict[str, Any] = json.loads(text)
        beat, failure, verdict, (number, lines) = (fields[name] for name in ("beat", "failure", "verdict", "report"))
        steps, seconds, waited_seconds = fields["step_times"]
        fields |= {
            "beat": Heartbeat(**beat | {"position": tuple(map(int, beat["position"])), "detail": str(beat["detail"])}),
            "stacks": tuple(map(str, fields["stacks"])),
            "report": (int(number), tuple(map(str, lines))),
            "failure": failure and Failure(**failure),
            "verdict": verdict and Verdict(**verdict),
            "step_times": StepTimes(int(steps), float(seconds), float(waited_seconds)),
        }
        record = cls(**fields)
        if not (isinstance(record.count, int) and isinstance(record.rank, int)):
            raise TypeError("count and rank must be integers")
        return record


class Board(Protocol):
    """A place for short texts between the processes of a run. Methods raise OSError if the board does not answer.

    name: for messages. period_seconds: between two writes of a status. poll_seconds: between two reads of an awaited text.
    """

    name: str
    period_seconds: float
    poll_seconds: float

    def write(self, name: str, text: str) -> None:
        """Replace the text of a name."""

    def read(self, name: str) -> str | None:
        """The text of a name; None if there is none."""


class Directory:
    """A board in a directory that all processes share."""

    period_seconds, poll_seconds = 0.5, 0.05

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)

    def write(self, name: str, text: str) -> None:
        """Written in place: the clients of a network file system see a new file of the same name much later."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            content = text.encode()
            if os.pwrite(descriptor, content, 0) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / name))
            os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)

    def read(self, name: str) -> str | None:
        try:
            descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(LARGEST).decode(errors="replace")
        finally:
            os.close(descriptor)


def read_record(board: Board, rank: int) -> Record | None:
    """The record of a process of any run; None if there is none, or while it is being written."""
    try:
        record = Record.from_json(board.read(f"{rank}.json") or "")
    except (ValueError, TypeError, KeyError):
        return None
    return record if record.rank == rank else None
