"""The interface of the process group of a run, and its implementation for a single process."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, get_args

from jaxdp.distributed import status

Request = Literal["", "save", "stop"]  # what a process asks of all; a step's metrics carry the largest one to all
REQUESTS: tuple[Request, ...] = get_args(Request)


class Agreement(NamedTuple):
    """What all processes do at the same sync point. action: "stop" or "save"; reason: why, for messages."""

    action: str
    reason: str


class ProcessGroup(Protocol):
    """The processes of a run: they exchange objects, agree on sync points and report failures.

    All methods may be called from any thread.
    """

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which alone writes the log, the result and the terminal output."""

    @property
    def hosts(self) -> list[str]:
        """Host name by rank."""

    @property
    def host_numbers(self) -> list[int]:
        """Index of the host by rank, numbered in the order of the ranks."""

    @property
    def status(self) -> status.ProcessStatus:
        """Activity, step and progress of this process."""

    @property
    def failed(self) -> bool:
        """Whether this process has reported a failure."""

    @property
    def before_exit(self) -> Callable[[], None]:
        """Called before the failure of another process, or the watchdog, ends this one."""

    @property
    def resume_hint(self) -> str:
        """How the run can be resumed, for the last line of an error."""

    def attach(self, *, before_exit: Callable[[], None], while_waiting: Callable[[], None]) -> None:
        """Begin a run: set its callbacks. All processes begin the same runs in the same order.

        before_exit: called before the failure of another process ends this one. while_waiting: called by the main thread
        while it waits for other processes; may raise.
        """

    def set_resume_hint(self, hint: str) -> None:
        """Set how the run can be resumed, for the last line of an error."""

    def all_gather_object(self, name: str, value: Any, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        """The values of all processes, by rank. Blocks until all have called it; while_waiting: called meanwhile; may raise."""

    def broadcast_object(self, name: str, value: Any) -> Any:
        """Rank 0's value, on every process. Values must be representable in JSON."""

    def request_save(self) -> bool:
        """Ask all processes to save at the same sync point. Returns True if this process can do it at once."""

    def next_request(self, stop_reason: str | None) -> Request:
        """The request of this process that the next step carries. stop_reason: as for `sync_point`."""

    def agree(self, request: Request) -> None:
        """Record the largest request that a completed step has carried; all processes call this with the same steps."""

    def sync_point(self, stop_reason: str | None) -> Agreement | None:
        """Pass a point of the program that all processes pass in the same order.

        Returns what the processes have agreed to do at this point, else None. stop_reason: the signal that asked this process
        to stop, or None.
        """

    def check_stop(self, stop_reason: str | None) -> Agreement | None:
        """The agreed stop if it is at the next sync point of this process, else None. Does not count as a sync point."""

    def set_activity(self, activity: str, step: int | None = None, detail: str = "") -> None:
        """Set what this process does now; all processes begin the same activities in the same order.

        activity, detail: see `ProcessStatus`. step: the step number; None keeps the previous one.
        """

    def set_background_save(self, name: str) -> None:
        """Set what is being saved in the background; "" when the save has ended."""

    def record_step(self, step: int, waited: float, completed: float) -> None:
        """Record how many seconds this process waited for its devices in a step, and when it had the results (monotonic)."""

    def straggler_report(self, whole_run: bool = False) -> dict[str, Any]:
        """See `Stragglers.report`: since the last call or in the whole session; {} on other ranks than 0."""

    def fail(self, reason: str, code: int = 1, collective_failed: bool = False, *, place: str = "") -> None:
        """Report that this process cannot continue, so that all others exit too.

        collective_failed: a collective raised, most likely because another process failed; that failure is then reported.
        place: where the error was raised.
        """

    def abort(self, reason: str) -> None:
        """End all processes, this one included, whatever their threads do."""

    def close(self, exiting: bool = False) -> None:
        """Leave the group once all processes are done. exiting: this process exits right afterwards."""


class SingleProcess:
    """The process group of a run of one process: every request takes effect immediately."""

    rank, num_processes, is_rank0 = 0, 1, True
    hosts, host_numbers = ["localhost"], [0]
    failed = False

    def __init__(self) -> None:
        self.resume_hint = ""
        self.before_exit: Callable[[], None] = lambda: None

    @property
    def status(self) -> status.ProcessStatus:
        return status.current()

    def attach(self, *, before_exit: Callable[[], None], while_waiting: Callable[[], None]) -> None:
        self.before_exit = before_exit

    def set_resume_hint(self, hint: str) -> None:
        self.resume_hint = hint

    def all_gather_object(self, name: str, value: Any, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        return [value]

    def broadcast_object(self, name: str, value: Any) -> Any:
        return value

    def request_save(self) -> bool:
        return True

    def next_request(self, stop_reason: str | None) -> Request:
        return ""  # a single process acts on its requests at once

    def agree(self, request: Request) -> None:
        pass

    def sync_point(self, stop_reason: str | None) -> Agreement | None:
        return Agreement("stop", stop_reason) if stop_reason else None

    def check_stop(self, stop_reason: str | None) -> Agreement | None:
        return self.sync_point(stop_reason)

    def set_activity(self, activity: str, step: int | None = None, detail: str = "") -> None:
        self.status.set_activity(activity, step, detail)

    def set_background_save(self, name: str) -> None:
        self.status.set_background_save(name)

    def record_step(self, step: int, waited: float, completed: float) -> None:
        pass

    def straggler_report(self, whole_run: bool = False) -> dict[str, Any]:
        return {}

    def fail(self, reason: str, code: int = 1, collective_failed: bool = False, *, place: str = "") -> None:
        pass

    def abort(self, reason: str) -> None:
        pass

    def close(self, exiting: bool = False) -> None:
        pass


def barrier(group: ProcessGroup, name: str) -> None:
    """Wait until all processes are ready for what `name` says.

    Needed before a program's first collective, which fails if another process is still compiling.
    """
    if group.num_processes > 1:
        group.all_gather_object(f"all processes to be ready for {name}", None)
