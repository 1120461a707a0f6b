"""Connections to rank 0's port that have not authenticated yet: limited in number, counted and logged when refused."""

import asyncio
import contextlib
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from jaxdp.errors import printable

MAX_PENDING = 64
LOG_SECONDS = 60.0  # between two log lines about refused connections


def max_pending() -> int:
    """Limit of pending connections: a small part of the files that this process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_PENDING if files == resource.RLIM_INFINITY else max(4, min(MAX_PENDING, files // 8))


class PendingConnections:
    """The tasks of pending connections, and the number of connections refused.

    info: called with a line of text in a separate thread, at most once a minute. limit: None for `max_pending()`.
    """

    def __init__(self, port: int, info: Callable[[str], None] | None = None, limit: int | None = None) -> None:
        self.port, self.info, self.limit = port, info or _print, limit or max_pending()
        self.addresses: dict[asyncio.Task, str] = {}  # the oldest first
        self.refused, self.last_refusal = 0, ""
        self._logged, self._logged_at = 0, float("-inf")

    def add(self, task: asyncio.Task, address: str) -> None:
        """Register a new connection. At the limit, the oldest connection of the address with the most is cancelled."""
        while len(self.addresses) >= self.limit:
            busiest, _ = Counter(self.addresses.values()).most_common(1)[0]
            oldest = next(task for task, source in self.addresses.items() if source == busiest)
            del self.addresses[oldest]
            oldest.cancel()
            self.refuse(busiest, "too many connections at a time")
        self.addresses[task] = address

    def remove(self, task: asyncio.Task) -> None:
        """Remove a connection that has authenticated or ended."""
        self.addresses.pop(task, None)

    def refuse(self, address: str, reason: str) -> None:
        """Count a refused connection."""
        self.refused += 1
        self.last_refusal = f"{printable(address, 100)}: {printable(reason)}"

    def log(self) -> None:
        """Log the connections refused since the last log line, at most once a minute. Called once a second."""
        new, now = self.refused - self._logged, time.monotonic()
        if new and now - self._logged_at >= LOG_SECONDS:
            self._logged, self._logged_at = self.refused, now
            count = f"{new} connection{'s' * (new > 1)}"
            text = f"refused {count} to port {self.port} without the run's secret (last: {self.last_refusal})"
            threading.Thread(target=self.info, args=(text,), daemon=True).start()  # a blocked stderr must not block the server


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"jaxdp: {text}", file=sys.stderr, flush=True)
