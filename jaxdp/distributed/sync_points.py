"""Agreement of all processes to stop or to save at the same sync point of the program.

A request from any process makes rank 0 send `pause`. Each process answers `paused_at` with the number of sync points that it
has passed, and passes no further one until rank 0 sends `agreed` with the largest of these numbers. Every process then
continues to that point and acts there. Each reports `done`, and rank 0 serves the next request.
"""

import threading
from collections.abc import Callable

from jaxdp.distributed.control_channel import Message, wait_until
from jaxdp.distributed.messages import InvalidMessage
from jaxdp.distributed.process_group import Agreement


class SyncPoints:
    """The client's side: counts the sync points of this process.

    changed: notified on every message. send: sends a message to rank 0.
    """

    def __init__(self, changed: threading.Condition, send: Callable[[Message], None]) -> None:
        self._changed, self._send = changed, send
        self._passed = 0
        self._paused = False
        self._agreed: tuple[int, Agreement] | None = None  # the sync point, and what to do there
        self._deferred: Agreement | None = None  # a save at the next sync point, reached while this process waits
        self._requested: set[str] = set()

    def request(self, action: str, reason: str) -> None:
        """Ask all processes to act at the same sync point; a request that is pending is not repeated."""
        with self._changed:
            if action not in self._requested:
                self._requested.add(action)
                self._send({"request": action, "reason": reason})

    def pass_next(self) -> Agreement | None:
        """Pass a sync point and return what to do there, if anything. Waits while the processes agree."""
        # The lock spans the wait and the count: a `pause` between them would be answered with the previous count.
        with self._changed:
            wait_until(self._changed, lambda: not self._paused or self._agreed)
            agreement = self._finish_agreement()
            if agreement is None or agreement.action != "stop":
                agreement, self._deferred = agreement or self._deferred, None
                self._passed += 1
                if agreement is not None:
                    self._requested.discard(agreement.action)
            return agreement

    def check_stop(self) -> Agreement | None:
        """The agreement to stop at the next sync point, if there is one, while this process waits between two of them.

        A save on which the processes have agreed there is left to `pass_next`, but reported as done: a request to stop that
        waits for it could otherwise not be served before the wait ends. Until then, this process requests no other save.
        """
        with self._changed:
            agreement = self._finish_agreement()
            if agreement is None or agreement.action == "stop":
                return agreement
            self._deferred = agreement
        return None

    def _finish_agreement(self) -> Agreement | None:
        """The agreement at the next sync point, reported as done; None if there is none."""
        if self._agreed is None or self._passed < self._agreed[0]:
            return None
        agreement = self._agreed[1]
        self._agreed, self._paused = None, False
        if agreement.action == "stop":
            self._deferred = None  # the trainer saves after a stop
            self._requested.discard("stop")
        self._send({"done": agreement.action})
        return agreement

    def handle_pause(self) -> None:
        with self._changed:
            self._paused = True
            self._send({"paused_at": self._passed})

    def handle_agreed(self, sync_point: int, agreement: Agreement) -> None:
        with self._changed:
            self._agreed = sync_point, agreement


class SyncPointCoordinator:
    """Rank 0's side: serves one request at a time. send_all: sends a message to all processes."""

    def __init__(self, num_processes: int, send_all: Callable[[Message], None]) -> None:
        self.num_processes, self._send_all = num_processes, send_all
        self._requests: list[Agreement] = []  # the first is being served if `_counts` is not None
        self._counts: dict[int, int] | None = None
        self._done: set[int] = set()

    @property
    def is_pending(self) -> bool:
        return bool(self._requests)

    def add_request(self, action: str, reason: str) -> None:
        """Serve a request after those that are pending. One of the same kind is dropped, unless it repeats a save on which the
        processes have agreed, and on which some of them have acted."""
        is_agreed = self._counts is not None and len(self._counts) == self.num_processes
        pending = self._requests[1:] if is_agreed and action != "stop" else self._requests
        if action not in [request.action for request in pending]:
            self._requests.append(Agreement(action, reason))
            self._serve_next()

    def _serve_next(self) -> None:
        if self._requests and self._counts is None:
            self._counts = {}
            self._send_all({"pause": self._requests[0].action})

    def add_count(self, rank: int, passed: int) -> None:
        """The sync points that a process has passed. Raises InvalidMessage if it was not asked."""
        if self._counts is None or rank in self._counts:
            raise InvalidMessage("unexpected message 'paused_at'")
        self._counts[rank] = passed
        if len(self._counts) == self.num_processes:
            self._done = set()
            action, reason = self._requests[0]
            self._send_all({"agreed": max(self._counts.values()), "action": action, "reason": reason})

    def add_done(self, rank: int, action: str) -> None:
        """A process has acted. Raises InvalidMessage if that was not agreed."""
        if not self._requests or self._requests[0].action != action:
            raise InvalidMessage("unexpected message 'done'")
        self._done.add(rank)
        if len(self._done) == self.num_processes:
            self._requests.pop(0)
            self._counts = None
            self._serve_next()
