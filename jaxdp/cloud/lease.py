"""A lease on a folder in object storage, so that one process at a time writes there.

`.lease/NUMBER.json` is created by one atomic request, so that only one process gets a number. Its holder renews it; no other
process writes to it. A process that has not seen it change for its `seconds`, by its own clock, may create the next number,
which ends the older lease. The clocks of different machines are never compared.
"""

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxdp.cloud.location import Location, ObjectNotFoundError
from jaxdp.cloud.retry import sleep
from jaxdp.errors import StorageError

FOLDER = ".lease"
RENEWALS = 4  # within the time after which a lease expires
POLL_SECONDS = 2.0  # between two reads of another process's lease
ATTEMPTS = 5  # to read a lease that seems to be damaged


class LeaseHeld(Exception):
    """Another process holds the lease and renews it. The message names it. lease: as last read."""

    def __init__(self, lease: "LeaseRecord") -> None:
        super().__init__(lease.holder)
        self.lease = lease


class LeaseLost(Exception):
    """Another process has taken over. The message names it."""


@dataclass(frozen=True)
class LeaseRecord:
    """The content of a lease.

    token: identifies the process that created it. holder: the process, for people. seconds: time without renewal after which it
    expires. renewals: counted by the holder. released: whether the holder has ended. adopted: what the folder held just after
    the lease began; None until the holder has listed it. final: files that the holder completed at its end, with their sizes.
    """

    number: int
    token: str
    holder: str
    seconds: float
    renewals: int = 0
    released: bool = False
    adopted: list[str] | None = None
    final: dict[str, list[int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{FOLDER}/{self.number:06}.json"

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self)) + "\n").encode()


def newest_lease(location: Location) -> LeaseRecord | None:
    """The newest lease, which alone counts; None if the folder never had one. Raises StorageError."""
    from pydantic import TypeAdapter

    attempts = 0
    while True:
        names = _names(location)
        if not names:
            return None
        try:
            name = max(names, key=_number)
            record = TypeAdapter(LeaseRecord).validate_json(location.read_intact(name))
            return replace(record, number=_number(name))
        except ObjectNotFoundError:  # removed by the holder of a newer one
            continue
        except ValueError:  # on a file system, perhaps because it is being written
            attempts += 1
            if attempts == ATTEMPTS:
                raise StorageError(f"the lease {name} is damaged; delete it", f"{location.url}/{name}") from None
            time.sleep(0.1)


def wait_until_free(location: Location, lease: LeaseRecord, while_waiting: Callable[[], Any] = lambda: None) -> LeaseRecord:
    """Wait until a lease ends. Returns its last state: released, or not renewed for its `seconds`.

    while_waiting: see `sleep`. Raises LeaseHeld if the holder renews the lease meanwhile or another process takes over, and
    StorageError if a request fails.
    """
    began = time.monotonic()
    while time.monotonic() - began <= lease.seconds:
        sleep(min(POLL_SECONDS, lease.seconds / RENEWALS), while_waiting)
        newest = newest_lease(location) or lease
        if newest.released:
            return newest
        if newest != lease:
            raise LeaseHeld(newest)
    return lease


def _names(location: Location) -> list[str]:
    """The leases in the folder, which on a file system may also hold a file that is being written."""
    return [name for name in location.sizes(FOLDER) if re.fullmatch(rf"{FOLDER}/\d+\.json", name)]


def _number(name: str) -> int:
    return int(name.rpartition("/")[2].removesuffix(".json"))


class Lease:
    """A lease that this process holds. A thread renews it until `release` or `abandon`.

    record: as this process last wrote it. lost: the newer lease, once another process has taken over. is_exclusive: whether the
    storage refuses to create an object that exists; if not, two processes that start at the same moment may both get the lease.
    """

    def __init__(self, location: Location, record: LeaseRecord, *, is_exclusive: bool = True) -> None:
        self.location, self.record, self.is_exclusive = location, record, is_exclusive
        self.lost: LeaseRecord | None = None
        self._confirmed = time.monotonic()  # when this was still the newest lease
        self._stopping = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls,
        location: Location,
        seconds: float,
        *,
        token: str | None = None,
        adopt: Callable[[LeaseRecord | None], list[str]],
        on_wait: Callable[[LeaseRecord], None] = lambda record: None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> "Lease":
        """Acquire the lease, after waiting until an earlier one is released or expires.

        seconds: time without renewal after which the new lease expires. token: of an earlier lease whose process has certainly
        ended. adopt: lists what the folder holds under the previous lease, for the record. It is called once the previous lease
        has ended, so that it lists all that the previous holder completed. on_wait: called with the lease that is waited for.
        while_waiting: see `wait_until_free`, whose errors this method also raises.
        """
        while True:
            newest = newest_lease(location)
            if newest is not None and not newest.released and newest.token != token:
                on_wait(newest)
                newest = wait_until_free(location, newest, while_waiting)
            record = LeaseRecord(newest.number + 1 if newest else 1, secrets.token_hex(8), _process(), seconds)
            location.create(record.name, record.to_bytes())  # a repeated request may report that our own lease exists
            # An older number may be free again, because its lease was removed: only the newest counts.
            if newest_lease(location) == record:
                is_exclusive = not location.create(record.name, record.to_bytes())
                record = replace(record, adopted=adopt(newest))
                location.write(record.name, record.to_bytes())
                location.remove([name for name in _names(location) if _number(name) < record.number])
                return cls(replace(location, patience=None), record, is_exclusive=is_exclusive)  # `_renew` retries

    def check(self) -> None:
        """Raise LeaseLost if another process has taken over, according to the last renewal."""
        if self.lost:
            raise LeaseLost(self.lost.holder)

    def verify(self) -> None:
        """Ask whether this is still the newest lease. Raises LeaseLost, and StorageError if the request fails."""
        newest = newest_lease(self.location)
        if newest is not None and newest.number > self.record.number:
            self.lost = newest
        self.check()

    def confirm(self) -> None:
        """Raise LeaseLost if another process may have taken over. Asks only if the lease was not renewed recently, for example
        because this process was suspended. Raises StorageError if that request fails."""
        if time.monotonic() - self._confirmed > self.record.seconds / 2:
            began = time.monotonic()
            self.verify()
            self._confirmed = began
        self.check()

    def release(self, final: dict[str, list[int]]) -> None:
        """Let other processes take over at once. final: see `LeaseRecord`. Raises StorageError."""
        self.abandon()
        with self._writing:
            self.verify()
            self.record = replace(self.record, released=True, final=final)
            self.location.write(self.record.name, self.record.to_bytes())

    def abandon(self) -> None:
        """Stop renewing the lease, which then expires."""
        self._stopping.set()
        self._thread.join(timeout=1)

    def _renew(self) -> None:
        while not self._stopping.wait(self.record.seconds / RENEWALS) and self.lost is None:
            try:
                with self._writing:
                    began = time.monotonic()
                    self.verify()
                    if not self._stopping.is_set():
                        self.record = replace(self.record, renewals=self.record.renewals + 1)
                        self.location.write(self.record.name, self.record.to_bytes())
                        self._confirmed = began
            except (StorageError, LeaseLost):  # retried; a lost lease ends the loop
                pass


def _process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
