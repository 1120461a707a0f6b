"""All-gather and broadcast of small objects between the processes of a run, through rank 0.

The n-th operation of a name in a run of one process belongs to the n-th operation of that name in this run of the others.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from jaxdp.distributed.control_channel import Message, in_main_thread, wait_until


class ObjectExchange:
    """The client's side. changed: notified on every message. send: sends a message to rank 0."""

    def __init__(self, changed: threading.Condition, send: Callable[[Message], None]) -> None:
        self._changed, self._send = changed, send
        self._results: dict[str, Any] = {}
        self._run = 0
        self._operations: dict[str, int] = defaultdict(int)

    def begin_run(self) -> None:
        """Count the operations from 1 again: a stop may end a run when only some processes have begun an operation."""
        with self._changed:
            self._run += 1
            self._operations.clear()

    def next_operation(self, name: str) -> str:
        """The name with the number of this operation, "run.number" from the second run of the processes on."""
        with self._changed:
            self._operations[name] += 1
            return f"{name} {self._operations[name]}" if self._run < 2 else f"{name} {self._run}.{self._operations[name]}"

    def all_gather(self, operation: str, value: Any, while_waiting: Callable[[], None]) -> list[Any]:
        self._send({"all_gather": operation, "value": value, "main_thread": in_main_thread()})
        return self._wait_for(operation, while_waiting)

    def broadcast(self, operation: str, value: Any, *, is_source: bool, while_waiting: Callable[[], None]) -> Any:
        if is_source:
            self._send({"broadcast": operation, "value": value})
        elif in_main_thread():
            self._send({"wait": operation})
        return self._wait_for(operation, while_waiting)

    def _wait_for(self, operation: str, while_waiting: Callable[[], None]) -> Any:
        wait_until(self._changed, lambda: operation in self._results, while_waiting)
        with self._changed:
            return self._results.pop(operation)

    def on_result(self, operation: str, value: Any) -> None:
        with self._changed:
            self._results[operation] = value


class ObjectCollector:
    """Rank 0's side: collects the values, and detects main threads that wait for different operations.

    send_all: sends a message to all processes. on_mismatch(rank, reason): called when the processes would wait forever.
    """

    def __init__(
        self, num_processes: int, send_all: Callable[[Message], None], on_mismatch: Callable[[int, str], None]
    ) -> None:
        self.num_processes, self._send_all, self._on_mismatch = num_processes, send_all, on_mismatch
        self._values: dict[str, dict[int, Any]] = {}
        self._broadcast: set[str] = set()
        self._waiting: dict[int, str] = {}  # the operation that the main thread of each process waits for

    def all_gather(self, rank: int, operation: str, value: Any) -> bool:
        """Add the value of a process. Returns whether the operation is complete."""
        values = self._values.setdefault(operation, {})
        values[rank] = value
        if len(values) < self.num_processes:
            return False
        del self._values[operation]
        self._complete(operation, [values[rank] for rank in range(self.num_processes)])
        return True

    def broadcast(self, operation: str, value: Any) -> None:
        """Send a value of rank 0, whether the other processes wait for it yet or not."""
        self._broadcast.add(operation)
        self._complete(operation, value)

    def is_broadcast(self, operation: str) -> bool:
        """Whether rank 0 has broadcast this operation's value."""
        return operation in self._broadcast

    def _complete(self, operation: str, value: Any) -> None:
        self._waiting = {rank: name for rank, name in self._waiting.items() if name != operation}
        self._send_all({"result": operation, "value": value})

    def add_waiting(self, rank: int, operation: str, *, agreement_pending: bool) -> None:
        """Record that the main thread of a process does nothing but wait for an operation.

        agreement_pending: the processes are about to act at a sync point, which ends the wait.
        """
        self._waiting[rank] = operation
        if len(self._waiting) < self.num_processes or len(set(self._waiting.values())) == 1 or agreement_pending:
            return
        other = next(rank for rank, name in sorted(self._waiting.items()) if name != self._waiting[0])
        name, name_of_rank0 = (self._waiting[rank].rpartition(" ")[0] for rank in (other, 0))
        self._on_mismatch(other, f"waits for {name!r} while rank 0 waits for {name_of_rank0!r}: the processes have diverged")

    def remove_waiting(self, rank: int) -> None:
        self._waiting.pop(rank, None)
