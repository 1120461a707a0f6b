"""A source of bytes for data: the objects below a URL, listed, fetched, checked, and kept in the local cache."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import google_crc32c

from jaxdp.cloud.cache import Cache
from jaxdp.cloud.local import local_directory
from jaxdp.cloud.location import CONNECTIONS, READS, Location, ObjectInfo, join_url, open_location, storage_errors
from jaxdp.cloud.read_ahead import BYTES, ITEMS, Daemons
from jaxdp.cloud.retry import START_SECONDS, Patience
from jaxdp.config import Storage
from jaxdp.errors import StorageError, print_safe
from jaxdp.files import allow_open_files

RUN_SECONDS = 3600.0  # how long failing requests are repeated once data are open
PIECE = 2**23  # bytes of an object that one request fetches
PIECES_AHEAD = 4
DOWNLOADS = 4  # objects that are copied to files at a time
FILES = 16 * CONNECTIONS  # open at a time: copies of two splits; connections, also idle, of obstore and the file system
BUSY_SECONDS = 0.2  # pause while another process makes a copy
Result = TypeVar("Result")


class RemoteData:
    """The data set at the URL of `data.directory`. Names of objects are relative to this URL.

    Raises ConfigError for a URL that cannot be read, and if local copies cannot be written.
    """

    def __init__(self, url: str, storage: Storage, while_waiting: Callable[[], Any] = lambda: None) -> None:
        """while_waiting: called several times a second while requests are repeated. Any thread may call it."""
        allow_open_files(FILES)
        self.url, self.location = url, open_location(url, "data.directory", notice=self.notice)
        self.limit = round(storage.cache_gigabytes * 1e9)
        self.cache = Cache(local_directory(storage) / "data", self.location.url, limit=self.limit, notice=self.notice)
        self.patience = Patience(START_SECONDS, self.notice, while_waiting=while_waiting)
        self.daemons, self.pieces = Daemons(CONNECTIONS), Daemons(DOWNLOADS * PIECES_AHEAD)
        self._etag_is_md5 = True

    def notice(self, text: str) -> None:
        """Show a line while a run continues."""
        print_safe(text, sys.stderr)

    def url_of(self, name: str) -> str:
        return join_url(self.location.url, name) if name else self.location.url

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Raise ConfigError for requests that cannot succeed while the data set is opened; then repeat them for longer."""
        self.patience.seconds = START_SECONDS
        with storage_errors(self.url, "data.directory"):
            yield
        self.patience.seconds = RUN_SECONDS

    def ask(self, request: Callable[[Location], Result]) -> Result:
        """The result of a request, which is repeated while it fails. Raises StorageError if it cannot succeed."""
        return self.patience(lambda: request(self.location))

    def each(self, function: Callable[[str], Result], names: list[str]) -> list[Result]:
        """The results of a function of names, computed many at a time."""
        return [future.result() for future in [self.daemons.submit(function, name) for name in names]]

    def list_below(self, folders: list[str]) -> dict[str, ObjectInfo]:
        """The objects at any depth below folders, without those whose names, or their folders' names, begin with a dot."""
        objects: dict[str, ObjectInfo] = {}
        while folders:
            listings = self.each(lambda name: self.ask(lambda location: location.list_folder(name)), folders)
            for folder, (_, found) in zip(folders, listings, strict=True):
                objects |= {f"{folder}/{name}": info for name, info in found.items() if not name.startswith(".")}
            below = ((folder, name) for folder, (names, _) in zip(folders, listings, strict=True) for name in names)
            folders = [f"{folder}/{name}" for folder, name in below if not name.startswith(".")]
        return objects

    def size_warnings(self, size: int, images: int) -> list[str]:
        """A warning if the local copies of all objects of a split, of `size` bytes, would be larger than the cache.

        No warning for so few images that the next epoch's images are read ahead while this epoch's are still in memory.
        """
        if size <= self.limit or (size < BYTES and 2 * images <= ITEMS):
            return []
        share = 100 * (1 - self.limit / size)
        return [
            f"storage.cache_gigabytes={self.limit / 1e9:g}: a split of {self.url} has {size / 1e9:,.1f} GB, of which "
            f"{share:.0f} % will be read from the URL in every epoch"
        ]

    def read(self, name: str, info: ObjectInfo) -> bytes:
        """The content of an object, from its local copy if there is one."""
        data = self.cache.read(name, info)
        if data is None:
            data = self.ask(lambda location: self.read_checked(location, name, info))
            self.cache.write(name, info, data)
        return data

    def read_checked(self, location: Location, name: str, info: ObjectInfo) -> bytes:
        """The content of an object from the URL. Raises StorageError if it does not match `info`."""
        is_verifiable = info.checksum() is not None and self._etag_is_md5
        data = location.read(name, verified=is_verifiable)
        if info.matches(data):
            return data
        self._check_unchanged(location, name, info)
        # If S3 encrypts an object with a KMS key, its ETag looks like an MD5 digest but is not one.
        may_be_none = len(data) == info.size and info.tag.startswith("md5:")
        if may_be_none and (not self._etag_is_md5 or data == location.read(name)):
            self._etag_is_md5 = False
            return data
        raise StorageError("the content does not have the size or the checksum of the object", self.url_of(name))

    def _check_unchanged(self, location: Location, name: str, info: ObjectInfo) -> None:
        if location.info(name) != info:
            raise StorageError("changed since the data set was opened", self.url_of(name), permanent=True)

    def download(self, name: str, info: ObjectInfo) -> Path | None:
        """Copy an object to a local file; None if there is no room for it.

        Raises BlockingIOError if another process copies it at this moment.
        """
        descriptor = self.cache.begin_file(name, info.size)
        if descriptor is None:
            return None
        try:
            crc = self._fill_intact(descriptor, name, info)
            self.ask(lambda location: self._check_unchanged(location, name, info))
        except BaseException:
            self.cache.abandon_file(descriptor, name, info.size)
            raise
        return self.cache.finish_file(descriptor, name, info, crc=crc)

    def each_file(self, objects: dict[str, ObjectInfo]) -> list[Path | None]:
        """Local copies of objects as files, made if they are missing, a few at a time; None where there is no room."""
        downloads = Daemons(DOWNLOADS)
        futures = [downloads.submit(self._verified_file, name, info) for name, info in objects.items()]
        return [future.result() for future in futures]

    def _verified_file(self, name: str, info: ObjectInfo) -> Path | None:
        while True:
            self.patience.while_waiting()  # large copies take long to verify
            if path := self.cache.file(name, info, verify=True):
                return path
            try:
                return self.download(name, info)
            except BlockingIOError:  # another process makes this copy
                time.sleep(BUSY_SECONDS)

    def _fill_intact(self, descriptor: int, name: str, info: ObjectInfo) -> int:
        """Write the content of an object to a file, again if it does not match `info`; returns its CRC-32C."""
        earlier = None
        for _ in range(READS):
            crc, tag = self._fill(descriptor, name, info)
            if tag in (None, info.tag) or (tag == earlier and tag.startswith("md5:")):  # see `read_checked`
                return crc
            earlier = tag
        raise StorageError("the content does not have the checksum of the object", self.url_of(name))

    def _fill(self, descriptor: int, name: str, info: ObjectInfo) -> tuple[int, str | None]:
        """Write the content of an object to a file; returns its CRC-32C, and its tag if the tag is a checksum."""
        crc, checksum = google_crc32c.Checksum(), info.checksum()

        def fetch(start: int) -> bytes:
            end = min(start + PIECE, info.size)
            return self.ask(lambda location: location.read_range(name, start, end))

        starts = list(range(0, info.size, PIECE))
        futures = {start: self.pieces.submit(fetch, start) for start in starts[:PIECES_AHEAD]}
        for number, start in enumerate(starts):
            piece = futures.pop(start).result()
            self.patience.while_waiting()  # a large file is progress, too
            for following in starts[number + PIECES_AHEAD : number + PIECES_AHEAD + 1]:
                futures[following] = self.pieces.submit(fetch, following)
            os.pwrite(descriptor, piece, start)
            crc.update(piece)
            if checksum:
                checksum.update(piece)
        return int.from_bytes(crc.digest(), "big"), checksum.tag if checksum else None
