"""The process group of a run of several processes: a client of the control server on rank 0.

The control channel is separate from JAX's collectives, which wait forever when a process is gone. Over it the processes
exchange objects, agree on sync points and send heartbeats; when one fails, all others print which one and exit.
"""

import errno
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from jaxdp.distributed import connection, failure, listener, messages, stack_traces
from jaxdp.distributed.connection import Connection
from jaxdp.distributed.control_channel import ControlChannel, Message, in_main_thread, wait_until
from jaxdp.distributed.control_server import ControlServer
from jaxdp.distributed.failure import Failure, FailureHandler
from jaxdp.distributed.hang_rules import HangLimits
from jaxdp.distributed.heartbeat import HeartbeatSender
from jaxdp.distributed.launchers import Cluster, host_identity
from jaxdp.distributed.object_exchange import ObjectExchange
from jaxdp.distributed.process_group import Agreement
from jaxdp.distributed.secret import Secret
from jaxdp.distributed.status import JOINED, JOINING, Location, ProcessStatus
from jaxdp.distributed.stragglers import Stragglers
from jaxdp.distributed.sync_points import SyncPoints
from jaxdp.errors import EXIT_FAILURE, EXIT_STOPPED, ConfigError, first_line, printable


@dataclass(frozen=True)
class Member:
    """A process of the run. identity: of its host. gpus: those it can see. jax_port: a free port, on rank 0."""

    rank: int
    processes: int
    host: str
    identity: str
    gpus: list[str]
    jax_port: int | None


class ControlClient:
    """The process group of a process that has joined its run with `connect`."""

    def __init__(
        self,
        cluster: Cluster,
        connection: Connection,
        *,
        silence_seconds: float,
        status: ProcessStatus,
        secret: Secret,
        server: ControlServer | None = None,
        stragglers: Stragglers | None = None,
        on_heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self.cluster, self.silence_seconds = cluster, silence_seconds
        self.server, self.stragglers = server, stragglers  # on rank 0
        self.members: list[Member] = []  # by rank, once all have joined
        self._status = status
        self._while_waiting: Callable[[], None] = lambda: None
        self._rank0_location = Location("start")
        self._changed = threading.Condition()  # notified on every message
        self.channel = ControlChannel(connection, silence_seconds)
        self.exchange = ObjectExchange(self._changed, self.channel.send)
        self.sync_points = SyncPoints(self._changed, self.channel.send)
        self.heartbeat = HeartbeatSender(status, self.channel.send, on_heartbeat)
        self.failures = FailureHandler(self._changed, wait_for_others=self._wait_for_others, clean_up=secret.remove)

    @classmethod
    def connect(
        cls,
        cluster: Cluster,
        *,
        start_seconds: float,
        silence_seconds: float,
        gpus: list[str],
        while_waiting: Callable[[], None] = lambda: None,
        secret: Secret | None = None,
        status: ProcessStatus | None = None,
        limits: HangLimits | None = None,
        on_heartbeat: Callable[[], None] = lambda: None,
    ) -> "ControlClient":
        """Join the run: start the control server on rank 0, connect to it, and wait until all processes have joined.

        start_seconds: timeout for the slowest process. silence_seconds: time without a heartbeat after which a process counts
        as lost. gpus: those this process can see. while_waiting: called about every half second; may raise to give up. secret:
        authenticates the processes; None: JAXDP_SECRET. limits: time without progress that is allowed. on_heartbeat:
        called with every heartbeat.

        Raises ConfigError if the port is taken, the secret is missing or differs, or rank 0 refuses this process, and OSError
        if rank 0 cannot listen or does not answer.
        """
        secret, status = secret or Secret(cluster), status or ProcessStatus()
        status.set_membership(JOINING)
        host, identity = host_identity()
        address, stragglers, server = (cluster.address, cluster.port), None, None
        if cluster.rank == 0:
            stragglers = Stragglers(cluster.num_processes)
            server = _start_server(
                cluster,
                host,
                secret,
                start_seconds=start_seconds,
                silence_seconds=silence_seconds,
                on_step=stragglers.include,
                limits=limits,
            )
            address = server.local_address
        try:
            jax_port = _free_port() if server else None
            member = Member(cluster.rank, cluster.num_processes, host=host, identity=identity, gpus=gpus, jax_port=jax_port)
            established = connection.connect(
                cluster,
                address,
                secret=secret,
                read_key=(lambda: server.key) if server else secret.read,
                host=host,
                member=asdict(member),
                timeout_seconds=start_seconds,
                while_waiting=while_waiting,
            )
        except BaseException:
            secret.remove()
            raise
        client = cls(
            cluster,
            established,
            silence_seconds=silence_seconds,
            status=status,
            secret=secret,
            server=server,
            stragglers=stragglers,
            on_heartbeat=on_heartbeat,
        )
        try:
            client._join(while_waiting)
        finally:
            secret.remove()
        return client

    def _join(self, while_waiting: Callable[[], None]) -> None:
        """Wait until all processes have joined. while_waiting: called meanwhile, and whenever this process waits; may raise."""
        self._while_waiting = while_waiting
        self.channel.start(self._on_message, self._on_lost)
        self.heartbeat.start()
        try:
            wait_until(self._changed, lambda: self.members, while_waiting)
        except BaseException as error:
            self.failures.set_exiting()  # the caller reports the error
            self._send_failure(first_line(error), EXIT_STOPPED)
            self._wait_for_others()
            self.channel.close()
            raise
        self._status.set_membership(JOINED)

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
    def local_members(self) -> list[Member]:
        """The processes on this host, this one included, by rank."""
        identity = self.members[self.rank].identity
        return [member for member in self.members if member.identity == identity]

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of its host, from 0."""
        return [member.rank for member in self.local_members].index(self.rank)

    @property
    def jax_address(self) -> str:
        """HOST:PORT for JAX's coordination service."""
        return listener.format_address(self.cluster.address, self._jax_port)

    @property
    def jax_bind_address(self) -> str | None:
        """HOST:PORT at which rank 0 binds JAX's coordination service, None for all interfaces."""
        bound = self.server.bound_address if self.server else None
        return bound and listener.format_address(bound, self._jax_port)

    @property
    def _jax_port(self) -> int:
        port = self.members[0].jax_port
        assert port is not None
        return port

    @property
    def status(self) -> ProcessStatus:
        return self._status

    @property
    def failed(self) -> bool:
        return self.failures.reported

    @property
    def refused_connections(self) -> int:
        return self.server.refused_connections if self.server else 0

    @property
    def before_exit(self) -> Callable[[], None]:
        return self.failures.before_exit

    @property
    def resume_hint(self) -> str:
        return self.failures.resume_hint

    def attach(self, *, before_exit: Callable[[], None], while_waiting: Callable[[], None]) -> None:
        self._while_waiting = while_waiting
        self.failures.set_before_exit(before_exit)
        self.exchange.begin_run()

    def set_resume_hint(self, hint: str) -> None:
        self.failures.set_resume_hint(hint)

    def _on_message(self, message: Message) -> None:
        with self._changed:
            match message:
                case {"heartbeat": location}:
                    self._rank0_location = Location(**location)
                case {"pong": sent, "now": now}:
                    self.heartbeat.on_pong(sent, now)
                case {"members": members}:
                    self.members = [Member(**member) for member in members]
                case {"result": operation, "value": value}:
                    self.exchange.on_result(operation, value)
                case {"pause": _}:
                    self.sync_points.handle_pause()
                case {"agreed": sync_point, "action": action, "reason": reason}:
                    self.sync_points.handle_agreed(sync_point, Agreement(action, reason))
                case {"send_stacks": _}:
                    self.channel.send({"stacks": stack_traces.capture(self._status.training_thread)})
                case {"report": lines}:
                    stack_traces.print_lines(lines)
                case {"failure": fields}:
                    self.failures.on_failure(Failure.from_message(fields))
            self._changed.notify_all()

    def _on_lost(self, reason: str) -> None:
        host = self.members[0].host if self.members else None
        self.failures.on_failure(Failure(reason, EXIT_FAILURE, rank=0, host=host, location=self._rank0_location))

    def all_gather_object(self, name: str, value: Any, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        operation = self.exchange.next_operation(name)
        with self._status.at_barrier(operation):
            return self.exchange.all_gather(operation, value, while_waiting or self._main_thread_callback())

    def broadcast_object(self, name: str, value: Any) -> Any:
        operation = self.exchange.next_operation(f"rank 0's {name}")
        with self._status.at_barrier(operation):
            callback = self._main_thread_callback()
            return self.exchange.broadcast(operation, value, is_source=self.is_rank0, while_waiting=callback)

    def _main_thread_callback(self) -> Callable[[], None]:
        return self._while_waiting if in_main_thread() else lambda: None

    def set_activity(self, activity: str, step: int | None = None, detail: str = "") -> None:
        if self._status.set_activity(activity, step, detail):
            self.heartbeat.send_now()

    def set_background_save(self, name: str) -> None:
        self._status.set_background_save(name)
        self.heartbeat.send_now()

    def record_step(self, step: int, dispatched: float, completed: float) -> None:
        self.heartbeat.record_step(step, dispatched, completed)

    def remove_heartbeat_hook(self) -> None:
        """Stop calling `on_heartbeat`, before the interpreter exits."""
        self.heartbeat.remove_hook()

    def straggler_report(self, whole_run: bool = False) -> dict[str, Any]:
        return self.stragglers.report(self.hosts, whole_run) if self.stragglers else {}

    def request(self, action: str, reason: str = "") -> bool:
        self.sync_points.request(action, reason)
        return False

    def sync_point(self, stop_reason: str | None) -> Agreement | None:
        self._request_stop(stop_reason)
        return self._record_stop(self.sync_points.pass_next())

    def check_stop(self, stop_reason: str | None) -> Agreement | None:
        self._request_stop(stop_reason)
        return self._record_stop(self.sync_points.check_stop())

    def _record_stop(self, agreement: Agreement | None) -> Agreement | None:
        if agreement is not None and agreement.action == "stop":
            self._status.record_stop()
        return agreement

    def _request_stop(self, stop_reason: str | None) -> None:
        if stop_reason:
            self.sync_points.request("stop", f"{stop_reason} to rank {self.rank} on {self.members[self.rank].host}")

    def fail(self, reason: str, code: int = EXIT_FAILURE, collective_failed: bool = False) -> None:
        # Rank 0 may notice the failure that broke a collective only after `silence_seconds`.
        if collective_failed and self.failures.wait(self.silence_seconds + failure.EXIT_SECONDS):
            failure.wait_for_exit()
        self.failures.set_exiting(failed=True)
        self._send_failure(reason, code)
        self.failures.wait(failure.EXIT_SECONDS)
        self._wait_for_others()

    def abort(self, reason: str) -> None:
        self._send_failure(reason, EXIT_FAILURE)
        failure.wait_for_exit()

    def _send_failure(self, reason: str, code: int) -> None:
        location = asdict(self._status.location())
        reason = reason or "no reason was given"
        self.channel.send({"fail": reason, "code": messages.failure_code(code), "location": location})

    def close(self, exiting: bool = False) -> None:
        if self.failures.exiting:
            return
        self.all_gather_object("all processes to exit", None, while_waiting=lambda: None)
        self.failures.set_exiting()
        self.channel.send({"goodbye": self.rank})
        self._wait_for_others(lambda server: server.all_gone if exiting else server.all_said_goodbye)

    def _wait_for_others(self, done: Callable[[ControlServer], bool] = lambda server: server.only_silent_left) -> None:
        """On rank 0, wait until the other processes have left.

        Rank 0 leaves last, because it also runs JAX's coordination service: JAX aborts every process that loses it.
        """
        deadline = time.monotonic() + failure.EXIT_SECONDS
        while self.server and time.monotonic() < deadline and not done(self.server):
            time.sleep(0.02)


def _start_server(
    cluster: Cluster,
    host: str,
    secret: Secret,
    *,
    start_seconds: float,
    silence_seconds: float,
    on_step: Callable[[int, list[float], list[float]], None],
    limits: HangLimits | None,
) -> ControlServer:
    try:
        server = ControlServer.start(
            cluster.address,
            cluster.port,
            cluster.num_processes,
            start_seconds=start_seconds,
            silence_seconds=silence_seconds,
            secret=secret,
            on_step=on_step,
            limits=limits,
        )
    except OSError as error:
        reason = f"rank 0 cannot listen on {host} ({error.strerror})"
        if error.errno != errno.EADDRINUSE:
            raise OSError(error.errno, f"port {cluster.port}: {reason}") from None
        raise ConfigError(
            "coordinator port", cluster.port, reason=reason, hint="another run may use it; choose another port"
        ) from None
    for warning in filter(None, (server.warning, secret.warning)):
        with suppress(OSError, ValueError):
            print(f"jaxdp: {printable(warning, 4096)}", file=sys.stderr, flush=True)
    return server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
