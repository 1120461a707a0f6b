"""The process group of a run that has several processes: they exchange objects and agree to stop or to save."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxdp.distributed import launchers, status
from jaxdp.distributed.launchers import Cluster, host_identity
from jaxdp.distributed.process_group import REQUESTS, Agreement, Request
from jaxdp.distributed.status_files import Board, Failure
from jaxdp.distributed.stragglers import Stragglers
from jaxdp.distributed.supervisor import Supervisor
from jaxdp.distributed.verdict import Limits
from jaxdp.errors import EXIT_FAILURE, EXIT_STOPPED, ConfigError

RETRY_SECONDS = 1.0
CLOSE_SECONDS = 10.0  # for a directory that does not answer at the end of a run
ABORT_SECONDS = 60.0
ALL = "all.values"  # what rank 0 has collected


@dataclass(frozen=True)
class Member:
    """A process of the run. identity: of its host. gpus: those it can see."""

    host: str
    identity: str
    gpus: list[str]


@contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "use a directory that this process can write to"
        raise ConfigError("--workdir", str(error.filename), reason=str(error.strerror), hint=hint) from None


class Processes:
    """The process group of a process that has joined its run with `join`."""

    def __init__(self, cluster: Cluster, supervisor: Supervisor) -> None:
        self.cluster, self.supervisor, self._board = cluster, supervisor, supervisor.board
        self.members: list[Member] = []
        self._while_waiting: Callable[[], None] = lambda: None
        self._exchange, self._is_closing = threading.Lock(), False
        self._operations: Counter[str] = Counter()
        self._outgoing: dict[str, dict[int, Any]] = {}
        self._collected: dict[str, dict[int, list[Any]]] = {}  # on rank 0
        self._request: Request = ""
        self._agreed: Request = ""
        self._steps_have_begun = False
        self._stragglers = Stragglers(cluster.num_processes)

    @classmethod
    def join(
        cls, cluster: Cluster, board: Board, limits: Limits, *, while_waiting: Callable[[], None] = lambda: None
    ) -> "Processes":
        """Start this process's status file, and wait for those of all others. while_waiting: called meanwhile; may raise.

        board: where the files are; all processes reach it. After `limits.start_seconds`, every process prints which processes
        are missing, and exits.
        """
        supervisor = Supervisor(cluster, board, limits)
        processes = cls(cluster, supervisor)
        supervisor.status.set_membership(status.JOINING)
        supervisor.start()
        try:
            with _as_config_error():
                board.write(f"{cluster.rank}.values", "{}")
            while not supervisor.session:
                while_waiting()
                time.sleep(board.poll_seconds)
            own = [*host_identity(), launchers.visible_gpus()]
            processes.members = [Member(*fields) for fields in processes.all_gather_object("members", own, while_waiting)]
        except BaseException as error:
            supervisor.fail(Failure.of(error))
            raise
        supervisor.status.set_membership(status.JOINED)
        return processes

    @property
    def rank(self) -> int:
        return self.cluster.rank

    @property
    def num_processes(self) -> int:
        return self.cluster.num_processes

    @property
    def is_rank0(self) -> bool:
        return self.cluster.rank == 0

    @property
    def hosts(self) -> list[str]:
        return [member.host for member in self.members]

    @property
    def host_numbers(self) -> list[int]:
        numbers: dict[str, int] = {}
        return [numbers.setdefault(member.identity, len(numbers)) for member in self.members]

    @property
    def status(self) -> status.ProcessStatus:
        return self.supervisor.status

    @property
    def failed(self) -> bool:
        return self.supervisor.failed

    @property
    def before_exit(self) -> Callable[[], None]:
        return self.supervisor.before_exit

    @property
    def resume_hint(self) -> str:
        return self.supervisor.resume_hint

    @property
    def local_members(self) -> list[Member]:
        """The processes on this host, this one included, by rank."""
        identity = self.members[self.rank].identity
        return [member for member in self.members if member.identity == identity]

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of its host, from 0."""
        return self.host_numbers[: self.rank].count(self.host_numbers[self.rank])

    def attach(self, *, before_exit: Callable[[], None], while_waiting: Callable[[], None]) -> None:
        self.supervisor.before_exit, self._while_waiting = before_exit, while_waiting
        self._request, self._agreed, self._steps_have_begun = "", "", False
        self._stragglers = Stragglers(self.num_processes)

    def set_resume_hint(self, hint: str) -> None:
        self.supervisor.resume_hint = hint

    # Exchange of objects. Each process has one file of values, because clients of a network file system see a new file late.

    def all_gather_object(self, name: str, value: Any, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        self._operations[name] += 1
        number = self._operations[name]
        with self._exchange:
            # A process that begins operation n has read the results of n - 1: nobody needs older values.
            self._outgoing[name] = {n: v for n, v in self._outgoing.get(name, {}).items() if n >= number - 1} | {number: value}
            self._publish()
        with self.status.at_barrier(name):
            if self.is_rank0:
                self._collect(name, number, while_waiting)
                return self._collected[name][number]
            return self._read(ALL, name, number, while_waiting=while_waiting)

    def broadcast_object(self, name: str, value: Any) -> Any:
        return self.all_gather_object(name, value)[0]

    def _collect(self, name: str, number: int, while_waiting: Callable[[], None] | None) -> None:
        files = [f"{rank}.values" for rank in range(self.num_processes)]
        values = [self._read(file, name, number, while_waiting=while_waiting) for file in files]
        with self._exchange:
            kept = {n: v for n, v in self._collected.get(name, {}).items() if n >= number - 1}
            self._collected[name] = kept | {number: values}
            self._write(ALL, self._collected)

    def _publish(self) -> None:
        self._write(f"{self.rank}.values", self._outgoing)

    def _write(self, name: str, values: dict[str, dict[int, Any]]) -> None:
        text = json.dumps({"session": self.supervisor.session, "values": values})
        self._retry(partial(self._board.write, name, text))

    def _read(self, file: str, name: str, number: int, *, while_waiting: Callable[[], None] | None) -> Any:
        in_main_thread = threading.current_thread() is threading.main_thread()
        while_waiting = while_waiting or (self._while_waiting if in_main_thread else lambda: None)
        while True:
            text = self._retry(partial(self._board.read, file))
            try:
                found = json.loads(text or "{}")
                if found["session"] == self.supervisor.session:
                    return found["values"][name][str(number)]
            except (ValueError, TypeError, KeyError):  # not there yet, or being written
                pass
            while_waiting()
            time.sleep(self._board.poll_seconds)

    def _retry(self, action: Callable[[], Any]) -> Any:
        began = time.monotonic()
        while True:
            try:
                return action()
            except OSError:  # it may answer again; the watchdog ends a run that waits too long
                if self._is_closing and time.monotonic() - began > CLOSE_SECONDS:
                    raise
                time.sleep(RETRY_SECONDS)

    # Agreement: see `jaxdp.training.requests`.

    def next_request(self, stop_reason: str | None) -> Request:
        self._steps_have_begun = True
        request: Request = "stop" if stop_reason else self._request
        self._request = ""
        if stop_reason:
            self.supervisor.set_stop_reason(stop_reason)
        return request

    def agree(self, request: Request) -> None:
        self._agreed = max(self._agreed, request, key=REQUESTS.index)

    def request_save(self) -> bool:
        self._request = "save"
        return False

    def sync_point(self, stop_reason: str | None) -> Agreement | None:
        agreed = self.check_stop(stop_reason)
        if agreed is None and self._agreed == "save":
            self._agreed = ""
            return Agreement("save", "")
        return agreed

    def check_stop(self, stop_reason: str | None) -> Agreement | None:
        if self._agreed == "stop":
            self.status.record_stop()
            return Agreement("stop", stop_reason or self.supervisor.stop_reason_of_others())
        if stop_reason and not self._steps_have_begun:  # nothing can be lost: end at once
            self.supervisor.fail(Failure(stop_reason, EXIT_STOPPED))
            return Agreement("stop", stop_reason)
        return None

    def set_activity(self, activity: str, step: int | None = None, detail: str = "") -> None:
        self.status.set_activity(activity, step, detail)

    def set_background_save(self, name: str) -> None:
        self.status.set_background_save(name)

    def record_step(self, step: int, waited: float, completed: float) -> None:
        self._stragglers.add(step, waited, completed)
        self.supervisor.own_step_times = self._stragglers.own

    def straggler_report(self, whole_run: bool = False) -> dict[str, Any]:
        return self._stragglers.report(self.supervisor.step_times, self.hosts, whole_run) if self.is_rank0 else {}

    def fail(self, reason: str, code: int = EXIT_FAILURE, collective_failed: bool = False, *, place: str = "") -> None:
        self.supervisor.fail(Failure(reason, code, collective_failed, place))

    def abort(self, reason: str) -> None:
        self.supervisor.fail(Failure(reason))
        self.supervisor.end_as_decided()
        time.sleep(ABORT_SECONDS)

    def close(self, exiting: bool = False) -> None:
        self._is_closing = True
        if not self.supervisor.failed:
            with suppress(OSError):  # the run has ended well, though its directory is gone
                self.all_gather_object("all processes to exit", None, while_waiting=lambda: None)
        self.supervisor.close()
