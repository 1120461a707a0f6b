"""Status files: each process writes what it does to processes/RANK.json of the run, and reads those of the others.

Rank 0 reads all files and decides who has failed (see `jaxdp.distributed.verdict`); the others read its verdict in its file.
A count that changes shows that a process is alive. No time stamp of another host is compared.
"""

import errno
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxdp.distributed import stack_traces
from jaxdp.distributed.status import Heartbeat
from jaxdp.distributed.stragglers import StepTimes
from jaxdp.errors import EXIT_FAILURE, EXIT_STOPPED, first_line

FOLDER = "processes"
LARGEST = 2**26  # bytes of a file
REASON_CHARS = 4096
NO_STEPS, STARTING = StepTimes(), Heartbeat("start")


@dataclass(frozen=True)
class Verdict:
    """Why a run ends. rank, host: of the process that failed, None if it is not one. code: exit code of the others."""

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
    """What a process reports of its own failure. collective: a collective has raised, maybe because another process failed.

    place: where the error was raised.
    """

    reason: str
    code: int = EXIT_FAILURE
    collective: bool = False
    place: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The failure that an exception is, in one line."""
        code = getattr(error, "exit_code", EXIT_FAILURE)
        place = "" if code == EXIT_STOPPED else stack_traces.place_of(error)
        is_collective = "JaxRuntimeError" in (type(error).__name__, type(error.__cause__).__name__)  # maybe of a callback
        return cls(first_line(error)[:REASON_CHARS], code, is_collective, place)


@dataclass(frozen=True)
class Record:
    """What a process writes of itself.

    run: the coordinator's address, so that a file of another run is not taken for one of this; "" for a single process. count:
    grows with every write. machine, pid: the process on its host. beat: what it does. place: the innermost frames of the thread
    that works. work: what its threads do: "code", "compiler", or "" if all wait for devices or other ranks. at_devices: whether
    the thread that trains waits for its devices. overdue: "late" or "stuck" if it is longer without progress than allowed.
    stacks: lines, if it is overdue. write_seconds: how long the last write took. verdict, report: of rank 0 (report: its
    number, and lines to print). left: the process ends, and expects no more of the others. session: of rank 0, once all
    processes have started: a random word for the values that they exchange. stop_reason: why this process asks all to stop.
    step_times: see `StepTimes`.
    """

    run: str
    rank: int
    host: str
    machine: str
    pid: int
    count: int = 0
    beat: Heartbeat = STARTING
    place: str = ""
    work: str = "code"
    at_devices: bool = False
    overdue: str = ""
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
        """What no other process has."""
        return self.machine, self.pid

    @property
    def seconds(self) -> float:
        """Time without progress; of a background save that is overdue, too."""
        return max(self.beat.idle_seconds, self.beat.save_seconds if self.overdue else 0.0)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """Raises ValueError, TypeError or KeyError for anything else than a record."""
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
    """Where the processes of a run leave short texts for each other. Methods raise OSError if it does not answer.

    name: for messages. period_seconds: between two writes of a status. poll_seconds: between two reads of what is awaited.
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


def file_name(rank: int) -> str:
    return f"{rank}.json"


def read_record(board: Board, rank: int) -> Record | None:
    """The record of a process of any run; None if there is none, or while it is being written."""
    text = board.read(file_name(rank))
    try:
        record = None if text is None else Record.from_json(text)
    except (ValueError, TypeError, KeyError):
        return None
    return record if record and record.rank == rank else None
