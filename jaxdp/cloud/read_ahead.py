"""Fetches items that take long to arrive, many at a time, in the order that they will be requested."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from jaxdp.cloud.location import CONNECTIONS

STOPPED = "stopped while waiting for object storage"
STOPPED_SECONDS = 5.0  # how long a thread waits for an item after a stop
IDLE_SECONDS = 10.0  # after which a thread without work ends
WAIT_SECONDS = 0.5  # after which a waiting thread checks whether it should stop
ITEMS, BYTES = 8 * CONNECTIONS, 2**28  # most items, and about the most bytes, that are fetched before they are asked for


class Daemons:
    """A pool of threads that do not keep a process from exiting, and that end when they have nothing to do."""

    def __init__(self, threads: int) -> None:
        self.threads, self.started, self.lock = threads, 0, threading.Lock()
        self.calls: SimpleQueue[tuple] = SimpleQueue()

    def submit(self, function: Callable, *arguments: Any) -> Future:
        """The future result of a call."""
        future: Future = Future()
        self.calls.put((future, function, arguments))
        with self.lock:
            if self.started < self.threads:
                self.started += 1
                threading.Thread(target=self._serve, name="storage", daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            try:
                future, function, arguments = self.calls.get(timeout=IDLE_SECONDS)
            except Empty:
                with self.lock:
                    if self.calls.empty():  # `submit` adds a call before it counts the threads
                        self.started -= 1
                        return
                continue
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)
            del future, function, arguments  # not kept until the next call


class ReadAhead:
    """Items of a source by index, fetched before they are asked for once their order is known.

    fetch: index -> item. size: index -> about its bytes. wait_seconds: how long threads have waited for items, in total.
    """

    def __init__(self, fetch: Callable[[int], Any], size: Callable[[int], int], daemons: Daemons) -> None:
        self.fetch, self.size, self.daemons = fetch, size, daemons
        self.lock = threading.Lock()
        self.order: Iterator[int] = iter(())
        self.pending: dict[int, list] = {}  # index -> [future, how often it will be asked for]
        self.items = self.bytes = self.stops = 0
        self.stopped = False
        self.wait_seconds = 0.0

    def stop(self) -> None:
        """Fetch nothing more ahead, and let threads that wait for an item raise InterruptedError.

        The process can then exit during an outage. Fetches that have begun continue.
        """
        with self.lock:
            self.stops, self.stopped = self.stops + 1, True
            self._drop_pending()

    def follow(self, order: Iterable[np.ndarray]) -> None:
        """Fetch the items in this order from now on, and drop any earlier order. order: arrays of indices."""
        with self.lock:
            self._drop_pending()
            self.stopped = False
            self.order = itertools.chain.from_iterable(map(np.ndarray.tolist, order))
            self._fill()

    def __getitem__(self, index: int) -> Any:
        """The item; fetched now unless it was expected. Raises what `fetch` raised."""
        with self.lock:
            stops, entry = self.stops, self.pending.get(index)
            if entry is None:
                future = self.daemons.submit(self.fetch, index)
            else:
                future = entry[0]
                self._take(index, entry)
                self._fill()
        began = time.monotonic()
        while not (wait([future], timeout=WAIT_SECONDS).done or future.cancelled()):  # `wait` ends late for a cancelled one
            late = self.stopped and time.monotonic() - began > STOPPED_SECONDS  # asked for after the stop, by a queued batch
            if late or self.stops != stops:
                raise InterruptedError(STOPPED)
        with self.lock:
            self.wait_seconds += time.monotonic() - began
        try:
            return future.result()
        except CancelledError:
            raise InterruptedError(STOPPED) from None

    def _drop_pending(self) -> None:
        for future, _ in self.pending.values():
            future.cancel()  # has no effect on a fetch that has begun
        self.pending, self.items, self.bytes = {}, 0, 0
        self.order = iter(())

    def _take(self, index: int, entry: list) -> None:
        entry[1] -= 1
        self.items -= 1
        if entry[1] == 0:
            del self.pending[index]
            self.bytes -= self.size(index)

    def _fill(self) -> None:
        while self.items < ITEMS and self.bytes < BYTES:
            index = next(self.order, None)
            if index is None:
                return
            entry = self.pending.get(index)
            if entry is None:
                self.pending[index] = [self.daemons.submit(self.fetch, index), 1]
                self.bytes += self.size(index)
            else:
                entry[1] += 1
            self.items += 1
