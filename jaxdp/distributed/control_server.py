"""The control server on rank 0: admits the processes of a run, relays their messages, and detects that one has failed.

The protocol is one signed JSON object per line over TCP (see `jaxdp.distributed.handshake` and `messages`). The server runs in
a separate thread, so it answers while the run compiles or waits.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jaxdp.distributed import handshake, listener, messages
from jaxdp.distributed.failure import MISSED_BEATS, Failure, exit_reason, silence_reason
from jaxdp.distributed.handshake import AuthenticationError, LineBuffer, SignedChannel
from jaxdp.distributed.hang_monitor import HangMonitor
from jaxdp.distributed.hang_rules import HangLimits
from jaxdp.distributed.object_exchange import ObjectCollector
from jaxdp.distributed.pending_connections import PendingConnections
from jaxdp.distributed.secret import Secret
from jaxdp.distributed.status import Heartbeat, Location
from jaxdp.distributed.sync_points import SyncPointCoordinator
from jaxdp.errors import EXIT_FAILURE, plural

TICK_SECONDS = 1.0
LATE_CONNECTION_SECONDS = 0.05  # between two connections once all processes have joined, to limit their cost
MAX_REFUSALS, MAX_NAMED = 20, 20  # reasons kept; ranks named in a message
Message = dict[str, Any]
OnStep = Callable[[int, list[float], list[float]], None]


def _format_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MAX_NAMED]))}{more}"


class Client:
    """A process that has joined, as the server sees it. record: see `messages.MEMBER`."""

    def __init__(self, record: Message, writer: asyncio.StreamWriter, channel: SignedChannel) -> None:
        self.record, self.rank, self.host = record, record["rank"], record["host"]
        self.heartbeat = Heartbeat("start")
        self.silent_ticks = 0
        self.said_goodbye = self.gone = False
        self._writer, self._channel = writer, channel

    @property
    def silent_seconds(self) -> float:
        return self.silent_ticks * TICK_SECONDS

    @property
    def location(self) -> Location:
        return self.heartbeat.location

    def tick(self) -> None:
        self.silent_ticks += 1

    def receive(self, line: bytes) -> Message:
        """The message of the next line. Raises ValueError or InvalidMessage."""
        self.silent_ticks = 0
        return messages.validate(self._channel.open(line), messages.TO_RANK_0)

    def set_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat

    def send(self, text: bytes) -> None:
        """Send an encoded message, unless the connection has ended."""
        if not (self.gone or self._writer.is_closing()):
            self._writer.write(self._channel.sign(text))

    def say_goodbye(self) -> None:
        self.said_goodbye = True

    def disconnect(self) -> None:
        self.gone = True


class StepTimes:
    """Collects when each process dispatched and completed a step; calls `on_step` with the times of all, by rank."""

    def __init__(self, num_processes: int, on_step: OnStep | None) -> None:
        self.num_processes, self._on_step = num_processes, on_step
        self._steps: dict[int, dict[int, tuple[float, float]]] = {}

    def add(self, rank: int, step: int, *, dispatched: float, completed: float) -> None:
        times = self._steps.setdefault(step, {})
        times[rank] = (dispatched, completed)
        if len(times) < self.num_processes:
            return
        if self._on_step:
            ordered = [times[rank] for rank in range(self.num_processes)]
            self._on_step(step, [start for start, _ in ordered], [end for _, end in ordered])
        self._steps = {other: times for other, times in self._steps.items() if other > step}


class ControlServer:
    """Create it with `start`. All methods but `start` run in the server's thread, its properties may be read from any.

    failure: the first failure of the run, None before. warning: a line to log about the listening address, or "".
    """

    def __init__(
        self,
        num_processes: int,
        *,
        start_seconds: float,
        silence_seconds: float,
        secret: Secret,
        pending: PendingConnections,
        on_step: OnStep | None = None,
        limits: HangLimits | None = None,
    ) -> None:
        self.num_processes, self.start_seconds, self.silence_seconds = num_processes, start_seconds, silence_seconds
        self.clients: dict[int, Client] = {}
        self.failure: Failure | None = None
        self.secret, self.pending, self.key = secret, pending, b""
        self.listeners: list[socket.socket] = []
        self.warning = ""
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="control-server", daemon=True)
        self._objects = ObjectCollector(num_processes, self._send_all, self._fail_rank)
        self._sync_points = SyncPointCoordinator(num_processes, self._send_all)
        self._step_times = StepTimes(num_processes, on_step)
        self._hosts: dict[int, str] = {}
        self._refusals: list[str] = []
        self._monitor = HangMonitor(
            limits or HangLimits(),
            self._hosts,
            request_stacks=lambda rank: self._send(self.clients[rank], {"send_stacks": rank}),
            report=lambda lines: self._send_all({"report": lines}),
            end_run=self._end_stuck_run,
        )

    @classmethod
    def start(
        cls,
        address: str,
        port: int,
        num_processes: int,
        *,
        start_seconds: float,
        silence_seconds: float,
        secret: Secret,
        on_step: OnStep | None = None,
        info: Callable[[str], None] | None = None,
        limits: HangLimits | None = None,
    ) -> "ControlServer":
        """Listen at an address, create the run's secret and start the server's thread.

        start_seconds: timeout for all processes to join. silence_seconds: time without a heartbeat after which a process counts
        as lost. on_step(step, dispatched, completed): called with the times of each step, by rank. info: called with lines to
        log about refused connections. limits: time without progress that is allowed. Raises OSError if the port is taken.
        """
        server = cls(
            num_processes,
            start_seconds=start_seconds,
            silence_seconds=silence_seconds,
            secret=secret,
            pending=PendingConnections(port, info),
            on_step=on_step,
            limits=limits,
        )
        server._listen(address, port)
        server.thread.start()
        return server

    def _listen(self, address: str, port: int) -> None:
        self.listeners, self.warning = listener.listen(address, port)
        try:
            self.key = self.secret.create()  # after the port is ours: the secret of another run there must stay
        except BaseException:
            for listening in self.listeners:
                listening.close()
            raise

    @property
    def local_address(self) -> tuple[str, int]:
        """(address, port) at which this host reaches the server."""
        return listener.local_address(self.listeners[0])

    @property
    def bound_address(self) -> str | None:
        """The address on which the server listens, None for several or all interfaces."""
        return None if len(self.listeners) > 1 or self.warning else self.local_address[0]

    @property
    def refused_connections(self) -> int:
        """Number of connections that did not prove the run's secret."""
        return self.pending.refused

    @property
    def all_said_goodbye(self) -> bool:
        return all(client.said_goodbye for client in list(self.clients.values()))

    @property
    def all_gone(self) -> bool:
        """Whether all processes but rank 0, which this server is part of, have disconnected."""
        return all(client.gone for client in self._others())

    @property
    def only_silent_left(self) -> bool:
        """Whether the other processes that are still connected send no heartbeats."""
        return all(client.gone or client.silent_ticks > MISSED_BEATS for client in self._others())

    def _others(self) -> list[Client]:
        return [client for rank, client in list(self.clients.items()) if rank]

    @property
    def _all_joined(self) -> bool:
        return len(self.clients) == self.num_processes

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.num_processes) if rank not in self.clients]

    async def _serve(self) -> None:
        accepting = [asyncio.create_task(self._accept(listening)) for listening in self.listeners]
        seconds = 0.0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            seconds += TICK_SECONDS
            if not self._all_joined and seconds >= self.start_seconds:
                self._fail_start()
            self._watch_for_hangs(seconds)
            self._watch_for_silence()
            location = self.clients[0].location if 0 in self.clients else Location("start")
            self._send_all({"heartbeat": asdict(location)})
            self.pending.log()
            for task in accepting:
                if task.done():
                    task.result()  # raises: accepting never ends otherwise

    def _watch_for_silence(self) -> None:
        for client in self.clients.values():
            client.tick()
        silent = [
            client
            for client in self.clients.values()
            if client.silent_seconds > self.silence_seconds and not client.said_goodbye
        ]
        if silent:
            reason = silence_reason(self.silence_seconds)
            if len(silent) == self.num_processes - 1 > 1 and 0 in self.clients:
                reason += f"; rank 0 hears no other process either, so its own host {self.clients[0].host} may be cut off"
            self._fail(silent[0], reason)

    def _watch_for_hangs(self, seconds: float) -> None:
        """Evaluate the heartbeats; before all processes have joined, report once which are missing."""
        if self._all_joined:
            heartbeats = {rank: client.heartbeat for rank, client in self.clients.items() if not client.said_goodbye}
            self._monitor.update(heartbeats)
            return
        limit = self._monitor.limits.stuck_seconds
        if seconds - TICK_SECONDS < limit <= seconds:
            missing = self._missing()
            count = f"{len(missing)} of {self.num_processes} processes have not connected"
            self._send_all({"report": [f"no progress for {limit:g} s: {count}: {_format_ranks(missing)}"]})

    def _fail_start(self) -> None:
        missing = self._missing()
        connected = ", ".join(f"rank {rank} on {client.host}" for rank, client in sorted(self.clients.items())[:MAX_NAMED])
        reason = f"{len(missing)} of {self.num_processes} processes did not connect within {self.start_seconds:g} s: "
        reason += f"{_format_ranks(missing)} (connected: {connected})" + "".join(f"; {text}" for text in self._refusals)
        if self.pending.refused:
            reason += f"; {self.pending.refused} connections without the run's secret were refused"
        self._set_failure(Failure(reason, EXIT_FAILURE, missing=missing))

    def _end_stuck_run(self, rank: int | None, reason: str) -> None:
        if rank is None:
            self._set_failure(Failure(reason, EXIT_FAILURE))
        else:
            self._fail_rank(rank, reason)

    def _fail_rank(self, rank: int, reason: str) -> None:
        self._fail(self.clients[rank], reason)

    def _fail(self, client: Client, reason: str, code: int = EXIT_FAILURE, *, location: Location | None = None) -> None:
        location = location or client.location
        self._set_failure(Failure(reason, messages.failure_code(code), client.rank, client.host, location))

    def _set_failure(self, failure: Failure) -> None:
        """Send the first failure to all processes; later ones follow from it."""
        if self.failure is None:
            self.failure = failure
            self._send_all(failure.to_message())

    def _send(self, client: Client, message: Message) -> None:
        client.send(handshake.encode(message))

    def _send_all(self, message: Message) -> None:
        text = handshake.encode(message)
        for client in self.clients.values():
            client.send(text)

    async def _accept(self, listening: socket.socket) -> None:
        loop, tasks = asyncio.get_running_loop(), set()
        listening.setblocking(False)
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError:  # the connection is gone, or this process has too many open files
                await asyncio.sleep(LATE_CONNECTION_SECONDS)
                continue
            task = asyncio.create_task(self._handle_connection(connection, address[0]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(LATE_CONNECTION_SECONDS if self._all_joined else 0)  # lets the clients' tasks run

    async def _handle_connection(self, connection: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.pending.add(task, address)
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=handshake.MAX_HANDSHAKE_LINE_BYTES)
        except (OSError, asyncio.CancelledError):
            connection.close()
            self.pending.remove(task)
            return
        try:
            if (client := await self._authenticate(task, reader, writer, address=address)) is not None:
                await self._serve_client(client, reader)
            writer.close()
        except BaseException:
            writer.transport.abort()
            raise

    async def _authenticate(
        self, task: asyncio.Task, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, address: str
    ) -> Client | None:
        """The client behind a connection, once it has authenticated; None if it does not or if rank 0 refuses it."""
        try:
            async with asyncio.timeout(handshake.HANDSHAKE_SECONDS):
                record, channel = await handshake.authenticate(reader, writer, key=self.key, source=self.secret.source)
            return self._admit(messages.MEMBER(record), writer, channel)
        except (AuthenticationError, messages.InvalidMessage) as error:
            self.pending.refuse(address, str(error))
        except TimeoutError:
            self.pending.refuse(address, f"it sent nothing for {handshake.HANDSHAKE_SECONDS:g} s")
        except (EOFError, OSError):
            pass  # a probe of the port, as by `jaxdp doctor`, or a connection that broke
        finally:
            self.pending.remove(task)
        writer.transport.abort()  # sends nothing more and frees the buffers
        return None

    def _admit(self, record: Message, writer: asyncio.StreamWriter, channel: SignedChannel) -> Client | None:
        """Add a process that has authenticated. If it does not fit into this run, send it the reason and return None."""
        rank = record["rank"]
        if refusal := self._why_refused(rank, record["processes"]):
            writer.write(channel.seal({"refused": refusal}))
            writer.close()
            if len(self._refusals) < MAX_REFUSALS:
                self._refusals.append(f"rank {rank} on {record['host']} was refused: {refusal}")
            return None
        writer.write(channel.seal({"welcome": rank}))
        client = self.clients[rank] = Client(record, writer, channel)
        self._hosts[rank] = client.host
        if self.failure:
            self._send(client, self.failure.to_message())
        elif self._all_joined:
            self._send_all({"members": [self.clients[rank].record for rank in range(self.num_processes)]})
        return client

    def _why_refused(self, rank: int, processes: int) -> str:
        if processes != self.num_processes:
            return f"it was started as one of {plural(processes, 'process')}, but rank 0 as one of {self.num_processes}"
        if rank in self.clients:
            return f"another process on {self.clients[rank].host} already has rank {rank}"
        if rank not in range(processes):
            return f"a run of {plural(processes, 'process')} has no rank {rank}"
        return ""

    async def _serve_client(self, client: Client, reader: asyncio.StreamReader) -> None:
        """Handle the messages of one process until its connection ends."""
        lines = LineBuffer(handshake.MAX_LINE_BYTES)
        try:
            while received := await reader.read(2**18):
                for line in lines.feed(received):
                    self._on_message(client, client.receive(line))
        except OSError:
            pass  # the connection was reset
        except Exception as error:
            self._fail(client, f"sent an invalid message ({type(error).__name__}: {error})")  # before it disconnects
        client.disconnect()
        if not client.said_goodbye:
            self._fail(client, exit_reason(client.silent_seconds, self.silence_seconds))

    def _on_message(self, client: Client, message: Message) -> None:
        match message:
            case {"heartbeat": heartbeat, "steps": steps, "ping": ping}:
                client.set_heartbeat(Heartbeat.from_message(heartbeat))
                self._send(client, {"pong": ping, "now": time.monotonic()})
                for step, dispatched, completed in steps:
                    self._step_times.add(client.rank, step, dispatched=dispatched, completed=completed)
            case {"all_gather": operation, "value": value, "main_thread": main_thread}:
                complete = self._objects.all_gather(client.rank, operation, value)
                if main_thread and not complete:
                    self._add_waiting(client.rank, operation)
            case {"broadcast": _} if client.rank:
                raise messages.InvalidMessage("message 'broadcast', which only rank 0 may send")
            case {"broadcast": operation, "value": value}:
                self._objects.broadcast(operation, value)
            case {"wait": operation}:
                if not self._objects.is_broadcast(operation):
                    self._add_waiting(client.rank, operation)
            case {"request": action, "reason": reason}:
                self._sync_points.add_request(action, reason)
            case {"paused_at": passed}:
                self._sync_points.add_count(client.rank, passed)
            case {"done": action}:
                self._sync_points.add_done(client.rank, action)
                self._objects.remove_waiting(client.rank)
            case {"fail": reason, "code": code, "location": location}:
                self._fail(client, reason, code, location=Location(**location))
            case {"stacks": stacks}:
                self._monitor.add_stacks(client.rank, stacks)
            case {"goodbye": _}:
                client.say_goodbye()

    def _add_waiting(self, rank: int, operation: str) -> None:
        self._objects.add_waiting(rank, operation, agreement_pending=self._sync_points.is_pending)
