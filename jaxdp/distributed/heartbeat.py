"""Sends this process's heartbeat to rank 0, with the times of its steps on rank 0's clock."""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from jaxdp.distributed.control_channel import Message
from jaxdp.distributed.status import HEARTBEAT_SECONDS, ProcessStatus


class HeartbeatSender:
    """A thread that sends a heartbeat every second, so that a slow step is not mistaken for a dead process.

    send: sends a message to rank 0. on_heartbeat: called with every heartbeat.
    """

    def __init__(
        self, status: ProcessStatus, send: Callable[[Message], None], on_heartbeat: Callable[[], None] = lambda: None
    ) -> None:
        self.status, self._send, self._on_heartbeat = status, send, on_heartbeat
        self._due = threading.Event()
        self._lock = threading.Lock()
        self._steps: list[tuple[int, float, float]] = []
        self._clock_offset, self._round_trip = 0.0, float("inf")  # rank 0's clock minus ours, by the fastest ping

    def start(self) -> None:
        threading.Thread(target=self._run, name="control-heartbeat", daemon=True).start()

    def send_now(self) -> None:
        """Send the next heartbeat without delay."""
        self._due.set()

    def remove_hook(self) -> None:
        """Stop calling `on_heartbeat`."""
        self._on_heartbeat = lambda: None

    def record_step(self, step: int, dispatched: float, completed: float) -> None:
        """Add a step to the next heartbeat; times in seconds of this process's monotonic clock."""
        with self._lock:
            self._steps.append((step, dispatched, completed))

    def on_pong(self, sent: float, server_time: float) -> None:
        """Update the clock offset by rank 0's answer to a heartbeat."""
        with self._lock:
            round_trip = time.monotonic() - sent
            if round_trip < self._round_trip:
                self._round_trip, self._clock_offset = round_trip, server_time - (sent + round_trip / 2)

    def _drain_steps(self) -> list[tuple[int, float, float]]:
        with self._lock:
            steps, self._steps = self._steps, []
            offset = self._clock_offset
        return [(step, dispatched + offset, completed + offset) for step, dispatched, completed in steps]

    def _run(self) -> None:
        self.status.use_heartbeat_ticks()
        while True:
            self._on_heartbeat()
            steps = self._drain_steps()
            self._send({"heartbeat": asdict(self.status.heartbeat()), "steps": steps, "ping": time.monotonic()})
            if not self._due.wait(HEARTBEAT_SECONDS):
                self.status.tick(HEARTBEAT_SECONDS)
            self._due.clear()
