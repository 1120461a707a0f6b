"""The processes of a run: they exchange objects, and agree to stop or to save at the same step."""

import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from jaxdp.distributed import launchers, status, watchdog
from jaxdp.distributed.follower import Follower
from jaxdp.distributed.launchers import Cluster, host_identity
from jaxdp.distributed.status import Board, Failure
from jaxdp.distributed.stragglers import Stragglers
from jaxdp.distributed.verdict import Limits
from jaxdp.errors import EXIT_STOPPED, ConfigError

RETRY_SECONDS = 1.0
CLOSE_SECONDS = 10.0  # for a directory that does not answer at the end of a run
ABORT_SECONDS = 60.0
ALL = "all.values"  # what rank 0 has collected
Waiting = Callable[[], None]
NONE, SAVE, STOP = range(3)  # requests of a process; a step's metrics carry the largest (`jaxdp.training.request_flags`)


class ProcessGroup:
    """The processes of a run. This class is a single process, whose requests take effect at once; see also `JoinedProcesses`.

    rank: of this process, from 0. hosts: host name by rank. host_numbers: index of the host by rank, numbered in the order of
    the ranks. status: what this process does. All methods may be called from any thread.
    """

    rank, num_processes = 0, 1

    def __init__(self) -> None:
        self.hosts, self.host_numbers = ["localhost"], [0]
        self.status = status.current()
        self.set_activity = self.status.set_activity  # all processes begin the same activities in the same order

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which alone writes the log, the result and the terminal output."""
        return self.rank == 0

    @property
    def failure(self) -> Failure | None:
        """The failure that this process has reported, if any."""
        return None

    def attach(self, *, before_exit: Callable[[], None], while_waiting: Callable[[], None]) -> None:
        """Begin a run: set its callbacks. All processes begin the same runs in the same order.

        before_exit: called before this process is ended because another one failed or because there is no progress.
        while_waiting: called by the main thread while it waits for other processes; may raise.
        """
        watchdog.current().before_exit = before_exit

    def set_resume_hint(self, hint: str) -> None:
        """Set how the run can be resumed, for the last line of an error."""
        watchdog.current().resume_hint = hint

    def all_gather_object(self, name: str, value: Any, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        """The values of all processes, by rank. Blocks until all have called it; while_waiting: called meanwhile; may raise.

        By default, the main thread calls the `while_waiting` of `attach` before the first step, and nothing afterwards.
        Otherwise, one process could stop here while another continues, and the next collective would wait forever. Values must
        be representable in JSON.
        """
        return [value]

    def broadcast_object(self, name: str, value: Any) -> Any:
        """Rank 0's value, on every process."""
        return self.all_gather_object(name, value)[0]

    def barrier(self, name: str) -> None:
        """Wait until all processes are ready for `name`. Call `check_stop` next: a stop may end the wait on some ranks only.

        Needed before a program's first collective, which fails if another process is still compiling.
        """

    def request_save(self) -> bool:
        """Ask all processes to save between the same two steps. Returns True if this process can do it at once."""
        return True

    def take_request(self, stop_reason: str | None) -> int:
        """The request of this process that the next step carries. A call also means that steps have begun. stop_reason: see
        `check_stop`."""
        return NONE

    def record_request(self, request: int) -> None:
        """Record the largest request that a completed step has carried; all processes call this with the same steps."""

    def take_agreed_save(self) -> bool:
        """Whether the processes have agreed to save a checkpoint since the last call."""
        return False

    def check_stop(self, stop_reason: str | None) -> str | None:
        """Why the processes stop between two steps, if they have agreed to. stop_reason: the signal to this process, if any."""
        return stop_reason

    def record_step(self, step: int, waited: float, completed: float) -> None:
        """Record how many seconds this process waited for its devices in a step, and the seconds of all steps up to it."""

    def straggler_report(self, whole_run: bool = False) -> dict[str, Any]:
        """See `Stragglers.report`: since the last call or in the whole session; {} except on rank 0."""
        return {}

    def fail(self, failure: Failure) -> None:
        """Report that this process cannot continue, so that all others exit too.

        If a collective failed here, most likely because another process failed, the failure of that process is reported.
        """

    def abort(self, reason: str) -> None:
        """End all other processes, and then this one, whatever their threads do. A single process continues."""

    def close(self) -> None:
        """Leave the group once all processes are done."""


class JoinedProcesses(ProcessGroup):
    """The process group of a process that has joined its run with `join`. gpus: by rank, the GPUs that a process can see."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self.follower, self.cluster = follower, follower.cluster
        self.rank, self.num_processes = self.cluster.rank, self.cluster.num_processes
        self.gpus: list[list[str]] = []
        self._while_waiting: Callable[[], None] = lambda: None
        self._exchange = ObjectExchange(self)
        self._begin_run()

    @classmethod
    def join(
        cls, cluster: Cluster, board: Board, limits: Limits, *, while_waiting: Callable[[], None] = lambda: None
    ) -> "JoinedProcesses":
        """Start this process's status file, and wait for the files of all processes.

        while_waiting: called meanwhile; may raise. board: where the files are; all processes reach it. After
        `limits.start_seconds`, every process prints which processes are missing, and exits. Raises ConfigError if this process
        cannot write to the board.
        """
        supervising, state = watchdog.current(), status.current()
        supervising.set_limits(limits)
        if state.activity == status.OUTSIDE:
            state.set_activity("start")
        try:
            board.write(f"{cluster.rank}.stacks", "")
        except OSError as error:
            hint = "use a directory that this process can write to"
            raise ConfigError("--workdir", str(error.filename), reason=str(error.strerror), hint=hint) from None
        follower = Follower(supervising, cluster, board)
        with suppress(OSError):  # resolve it while the network works
            _ = cluster.rank0_addresses
        processes = cls(follower)
        try:
            with state.at_barrier("all processes to connect"):
                while not follower.session:
                    while_waiting()
                    time.sleep(board.poll_seconds)
            own = [*host_identity(), launchers.visible_gpus()]
            members = processes.all_gather_object("members", own, while_waiting)
        except BaseException as error:
            follower.fail(Failure.of(error))
            raise
        processes.hosts, identities, processes.gpus = (list(values) for values in zip(*members, strict=True))
        numbers = {identity: number for number, identity in enumerate(dict.fromkeys(identities))}
        processes.host_numbers = [numbers[identity] for identity in identities]
        return processes

    @property
    def failure(self) -> Failure | None:
        return self.follower.watchdog.record.failure

    def _begin_run(self) -> None:
        self._request = self._agreed = NONE
        self._steps_have_begun = False
        self._stragglers = Stragglers(self.num_processes)

    def attach(self, *, before_exit: Callable[[], None], while_waiting: Callable[[], None]) -> None:
        super().attach(before_exit=before_exit, while_waiting=while_waiting)
        self._while_waiting = while_waiting
        self._exchange.begin_run()
        self._begin_run()

    def all_gather_object(self, name: str, value: Any, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        if while_waiting is None:
            may_stop = threading.current_thread() is threading.main_thread() and not self._steps_have_begun
            while_waiting = self._while_waiting if may_stop else lambda: None
        return self._exchange.all_gather(name, value, while_waiting)

    def barrier(self, name: str) -> None:
        self._exchange.all_gather(f"all processes to be ready for {name}", None, self._while_waiting)

    def request_save(self) -> bool:
        self._request = SAVE
        return False

    def take_request(self, stop_reason: str | None) -> int:
        self._steps_have_begun = True
        request, self._request = self._request, NONE
        if not stop_reason:
            return request
        self.follower.set_stop_reason(stop_reason)
        return STOP

    def record_request(self, request: int) -> None:
        self._agreed = max(self._agreed, request)

    def take_agreed_save(self) -> bool:
        if self._agreed != SAVE:
            return False
        self._agreed = NONE
        return True

    def check_stop(self, stop_reason: str | None) -> str | None:
        if self._agreed == STOP:
            self.status.record_stop()
            return stop_reason or self.follower.stop_reason_of_others()
        if stop_reason and not self._steps_have_begun:  # nothing can be lost: end at once
            self.follower.fail(Failure(stop_reason, EXIT_STOPPED))
            return stop_reason
        return None

    def record_step(self, step: int, waited: float, completed: float) -> None:
        self._stragglers.add(step, waited, completed)
        self.follower.watchdog.own_step_times = self._stragglers.own

    def straggler_report(self, whole_run: bool = False) -> dict[str, Any]:
        return self._stragglers.report(self.follower.step_times, self.hosts, whole_run) if self.is_rank0 else {}

    def fail(self, failure: Failure) -> None:
        self.follower.fail(failure)

    def abort(self, reason: str) -> None:
        self.follower.fail(Failure(reason), end=True)
        time.sleep(ABORT_SECONDS)

    def close(self) -> None:
        self._exchange.is_closing = True
        if self.failure is None:
            with suppress(OSError):  # the run has succeeded even if its directory is gone
                self.all_gather_object("all processes to exit", None, while_waiting=lambda: None)
        self.follower.leave()
        self.follower.watchdog.stop()


class ObjectExchange:
    """Exchange of objects on a board. Each process has one file of values, because network file systems show new files late."""

    def __init__(self, group: JoinedProcesses) -> None:
        self.group, self.board = group, group.follower.board
        self.is_closing = False
        self._writing = threading.Lock()
        self._run = 0  # counts the runs that these processes have begun
        self._operations: Counter[str] = Counter()
        self._outgoing: dict[str, dict[int, Any]] = {}
        self._collected: dict[str, dict[int, list[Any]]] = {}  # on rank 0

    def begin_run(self) -> None:
        """Count the operations from one again: a process that was stopped while it waited may have begun fewer of them."""
        self._run += 1
        self._operations.clear()
        with self._writing:
            for values in (self._outgoing, self._collected):
                for key in [key for key in values if int(key.partition(" ")[0]) < self._run - 1]:
                    del values[key]

    def all_gather(self, name: str, value: Any, while_waiting: Callable[[], None]) -> list[Any]:
        """See `ProcessGroup.all_gather_object`."""
        group, shown, name = self.group, name, f"{self._run} {name}"
        self._operations[name] += 1
        number = self._operations[name]
        publish = partial(self._publish, name=name, number=number, while_waiting=while_waiting)
        publish(f"{group.rank}.values", self._outgoing, value=value)
        with group.status.at_barrier(shown):
            if not group.is_rank0:
                return self._wait_for(ALL, name, number, while_waiting=while_waiting)
            files = [f"{rank}.values" for rank in range(group.num_processes)]
            values = [self._wait_for(file, name, number, while_waiting=while_waiting) for file in files]
            publish(ALL, self._collected, value=values)
            return values

    def _publish(
        self, file: str, values: dict[str, dict[int, Any]], *, name: str, number: int, value: Any, while_waiting: Waiting
    ) -> None:
        """Write a value. A process that begins operation n has read the results of n - 1, so older ones are not needed."""
        with self._writing:
            values[name] = {n: v for n, v in values.get(name, {}).items() if n >= number - 1} | {number: value}
            text = json.dumps({"session": self.group.follower.session, "values": values})
            self._retry(partial(self.board.write, file, f"{_checksum(text)}\n{text}"), while_waiting)

    def _wait_for(self, file: str, name: str, number: int, *, while_waiting: Waiting) -> Any:
        while True:
            checksum, _, text = (self._retry(partial(self.board.read, file), while_waiting) or "").partition("\n")
            try:
                found = json.loads(text)
                if checksum == _checksum(text) and found["session"] == self.group.follower.session:
                    return found["values"][name][str(number)]
            except (ValueError, TypeError, KeyError):  # not there yet, or being written
                pass
            while_waiting()
            time.sleep(self.board.poll_seconds)

    def _retry(self, action: Callable[[], Any], while_waiting: Waiting) -> Any:
        began = time.monotonic()
        while True:
            try:
                return action()
            except OSError:  # it may answer again; the watchdog ends a run that waits too long
                if self.is_closing and time.monotonic() - began > CLOSE_SECONDS:
                    raise
                while_waiting()
                time.sleep(RETRY_SECONDS)


def _checksum(text: str) -> str:
    """A checksum: a file that is read while it is written may hold a part of each text."""
    return f"{zlib.crc32(text.encode()):08x}"
