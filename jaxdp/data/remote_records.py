"""Records of array_record files at a URL: single ones by byte range, until the whole file has been copied."""

import ctypes
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.cloud.objects import ObjectInfo
from jaxdp.cloud.read_ahead import Daemons, ReadAhead
from jaxdp.cloud.source import BUSY_SECONDS, DOWNLOADS, FILES, Source
from jaxdp.data.array_record_index import BLOCK, POSTSCRIPT_BYTES, UnknownFormatError, footer_start, record_ranges
from jaxdp.data.decode import ImageError
from jaxdp.data.records import Records, check_array_record, count_examples, damaged, skip_image_decoding
from jaxdp.errors import ConfigError, StorageError, first_line
from jaxdp.files import allow_open_files


class Shard:
    """An array_record file at a URL.

    Until there is a local copy, `memory` is a file in memory with the size of the object that holds only its index and the
    records that are being read: array_record's reader decodes them, and checks their checksums.
    """

    def __init__(self, remote: Source, name: str, info: ObjectInfo, *, records: int) -> None:
        self.remote, self.name, self.info, self.records = remote, name, info, records
        self.lock = threading.Lock()
        self.local: Any = None  # the reader of the local copy
        self.reader: Any = None  # the reader of `memory`
        self.memory = -1
        self.ranges: np.ndarray | None = None

    def open(self) -> None:
        """Open the local copy, or read the index. Raises ConfigError for a damaged file, and StorageError."""
        if not self.open_local():
            with self.lock:
                self._open_index()

    def open_local(self) -> bool:
        """Open the local copy, if there is one."""
        if (path := self.remote.cache.file(self.name, self.info)) is None:
            return False
        try:
            check_array_record(str(path), self.records)
            self.local = _reader(path)
        except ConfigError:
            self.remote.cache.discard(self.name)
            return False
        return True

    def _open_index(self) -> None:
        """Read the index; once more if it is damaged, perhaps in transit."""
        if self.ranges is None:
            with suppress(ConfigError):
                return self._read_index()
            self._read_index()

    def _read_index(self) -> None:
        size, url = self.info.size, self.remote.url_of(self.name)
        try:
            if size <= BLOCK:
                raise UnknownFormatError("it does not end as an array_record file")
            last = size - BLOCK
            postscript = self._bytes(last, last + POSTSCRIPT_BYTES)
            start = footer_start(size, postscript)
            footer = self._bytes(start, last)
            ranges = record_ranges(footer, start)
        except UnknownFormatError as error:
            raise damaged(url, str(error)) from None
        if self.memory < 0:
            self.memory = os.memfd_create(os.path.basename(self.name), os.MFD_CLOEXEC)
            os.ftruncate(self.memory, size)
        os.pwrite(self.memory, footer + postscript, start)
        self.reader = _reader(f"/proc/self/fd/{self.memory}")
        for count in (len(ranges), self.reader.num_records()):
            if count != self.records:
                raise damaged(url, f"{count} records, expected {self.records}")
        self.ranges = ranges

    def _bytes(self, start: int, end: int) -> bytes:
        return self.remote.ask(lambda location: location.read_range(self.name, start, end))

    def size(self, record: int) -> int:
        """About the bytes of a record."""
        if self.ranges is None:
            return self.info.size // max(self.records, 1)
        start, end = self.ranges[record].tolist()
        return end - start

    def read(self, record: int) -> bytes:
        """A record. Raises ImageError if it is damaged at the URL, and StorageError."""
        local = self.local  # `copy` may set it meanwhile
        if local is not None:
            with suppress(RuntimeError):
                return local.read([record])[0]
        data = self._read_remote(record)
        if local is not None and self.local is local:  # the local copy is damaged
            self.local = None
            self.remote.cache.discard(self.name)
        return data

    def _read_remote(self, record: int) -> bytes:
        with suppress(RuntimeError):
            return self._fetch(record)
        with self.lock:  # the index or the record was damaged in transit, or is damaged at the URL
            self.ranges = None
        try:
            return self._fetch(record)
        except RuntimeError as error:
            raise ImageError(f"cannot read the record ({first_line(error)})") from None

    def _fetch(self, record: int) -> bytes:
        """A record from the URL. Raises RuntimeError if it is damaged."""
        with self.lock:
            self._open_index()
            assert self.ranges is not None
            start, end = self.ranges[record].tolist()
        data = self._bytes(start, end)
        with self.lock:
            try:
                os.pwrite(self.memory, data, start)
                return self.reader.read([record])[0]
            finally:
                _punch_hole(self.memory, start, end)

    def copy(self) -> None:
        """Make a local copy, if there is room, and read from it from then on.

        Raises BlockingIOError if another process makes it at this moment.
        """
        if self.local is None and not self.open_local():
            with suppress(StorageError):  # reading single records reports it
                self.remote.download(self.name, self.info)
            self.open_local()


class RemoteArrayRecords(Records):
    """The examples of a split in array_record files at a URL."""

    def __init__(self, remote: Source, features: Any, shards: list[tuple[Shard, range]]) -> None:
        """shards: with the records of the split in each."""
        self.remote, self.features = remote, features
        self.shards, self.records = [shard for shard, _ in shards], [records for _, records in shards]
        self.decoders = skip_image_decoding()
        self.starts = np.cumsum([0, *map(len, self.records)])
        self.ahead = ReadAhead(self._read, self._size, remote.daemons)
        self.downloads, self.copying = Daemons(DOWNLOADS), False

    @classmethod
    def open(
        cls, remote: Source, features: Any, instructions: Sequence[Any], *, objects: Sequence[tuple[str, ObjectInfo]]
    ) -> "RemoteArrayRecords":
        """The files of tensorflow-datasets' `instructions`, of which none is read. objects: (name, information) of each."""
        _check_zstandard(remote.url)
        files = list(zip(instructions, objects, strict=True))
        shards = [Shard(remote, *item, records=file.examples_in_shard) for file, item in files]
        records = [range(file.skip, file.skip + count_examples(file)) for file in instructions]
        return cls(remote, features, list(zip(shards, records, strict=True)))

    def start(self) -> None:
        """See `Records.start`."""
        allow_open_files(2 * len(self.shards) + FILES)
        by_name = {shard.name: shard for shard in self.shards}
        with self.remote.opening():
            self.remote.each(lambda name: by_name[name].open(), list(by_name))

    @property
    def wait_seconds(self) -> float:  # type: ignore[override]
        return self.ahead.wait_seconds

    @property
    def warnings(self) -> list[str]:  # type: ignore[override]
        return self.remote.size_warnings(sum(shard.info.size for shard in self.shards), len(self))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        return self.features.deserialize_example_np(self.ahead[index], decoders=self.decoders)

    def read_ahead(self, order: Iterable[np.ndarray]) -> None:
        """Fetch records in this order from now on, and copy whole files meanwhile. order: arrays of indices."""
        self.ahead.follow(order)
        if not self.copying:
            self.copying = True
            for shard in self.shards:
                self.downloads.submit(self._copy, shard)

    def stop_reading(self) -> None:
        """See `Records.stop_reading`."""
        self.ahead.stop()

    def _copy(self, shard: Shard) -> None:
        try:
            shard.copy()
        except BlockingIOError:  # look again after the other files
            time.sleep(BUSY_SECONDS)
            self.downloads.submit(self._copy, shard)
        except OSError as error:
            self.remote.notice(f"no local copy of {self.remote.url_of(shard.name)}: {error.strerror or first_line(error)}")

    def _find(self, index: int) -> tuple[Shard, int]:
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.shards[number], self.records[number][index - int(self.starts[number])]

    def _read(self, index: int) -> bytes:
        shard, record = self._find(index)
        local = shard.local
        data = shard.read(record)
        if local is not None and shard.local is None:  # it was damaged
            self.downloads.submit(self._copy, shard)
        return data

    def _size(self, index: int) -> int:
        shard, record = self._find(index)
        return shard.size(record)


def _reader(path: str | Path) -> Any:
    from array_record.python.array_record_module import ArrayRecordReader

    return ArrayRecordReader(str(path))


def _check_zstandard(url: str) -> None:
    try:
        import zstandard  # noqa: F401
    except ImportError:
        reason = "zstandard is not installed"
        raise ConfigError("data.directory", url, reason=reason, hint="pip install -e '.[cloud]'") from None


def _punch_hole(descriptor: int, start: int, end: int) -> None:
    """Free the memory of a range of a file, which then reads as zeros."""
    keep_size, punch = 1, 2
    ctypes.CDLL(None).fallocate(descriptor, keep_size | punch, ctypes.c_long(start), ctypes.c_long(end - start))
