"""Random access to the examples in array_record and TFRecord files, without TensorFlow; files are checked when opened."""

import itertools
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import numpy as np

from jaxdp.data.decode import ImageError
from jaxdp.errors import ConfigError, first_line
from jaxdp.files import allow_open_files, open_regular

HEADER, FOOTER = 12, 4  # bytes around a TFRecord's data: its length with a checksum, and the checksum of the data
CHECK_THREADS = 8


def open_array_records(instructions: Sequence[Any]) -> Sequence[bytes]:
    """The serialized examples of array_record files, by array_record's own reader.

    instructions: tensorflow-datasets' `FileInstruction`s. Raises ConfigError for a damaged file.
    """
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    with ThreadPoolExecutor(CHECK_THREADS) as threads:
        paths, expected = [str(file.filename) for file in instructions], [file.examples_in_shard for file in instructions]
        list(threads.map(check_array_record, paths, expected))
    allow_open_files(len(instructions))
    return ArrayRecordDataSource(instructions)


class TFRecords:
    """The serialized examples of TFRecord files, through the offsets of their records.

    instructions, errors: as of `open_array_records`. Reads the headers of all records.
    """

    def __init__(self, instructions: Sequence[Any]) -> None:
        self.paths = [str(file.filename) for file in instructions]
        with ThreadPoolExecutor(CHECK_THREADS) as threads:
            offsets = list(threads.map(record_offsets, self.paths, [file.examples_in_shard for file in instructions]))
        self.offsets = [rows[file.skip : file.skip + file.take] for rows, file in zip(offsets, instructions, strict=True)]
        self.starts = [0, *itertools.accumulate(map(len, self.offsets))]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> bytes:
        """An example. Raises ImageError if it is damaged."""
        shard = bisect_right(self.starts, index) - 1
        offset, length = self.offsets[shard][index - self.starts[shard]].tolist()
        with open_regular(self.paths[shard]) as file:
            raw = os.pread(file.fileno(), length + FOOTER, offset + HEADER)
        if masked_checksum(raw[:length]) != raw[length:]:
            raise ImageError(f"checksum mismatch in {self.paths[shard]}")
        return raw[:length]


READERS: dict[str, Callable[[Sequence[Any]], Any]] = {"array_record": open_array_records, "tfrecord": TFRecords}
"""Format of files -> the sequence of examples in the files of tensorflow-datasets' `FileInstruction`s."""


def damaged(path: str, reason: str) -> ConfigError:
    return ConfigError("data.directory", path, reason=f"damaged file: {reason}", hint="prepare it again")


def check_array_record(path: str, expected: int) -> None:
    """Raise ConfigError where a file does not have `expected` records: the reader finds none in a truncated file."""
    from array_record.python.array_record_module import ArrayRecordReader

    open_regular(path).close()
    reader = ArrayRecordReader(path)
    count = reader.num_records()
    try:
        reader.close()
    except RuntimeError as error:
        raise damaged(path, first_line(error, "truncated")) from None
    if count != expected:
        raise damaged(path, f"{count} records, expected {expected}")


def masked_checksum(data: bytes) -> bytes:
    """TFRecord's checksum: CRC-32C, rotated right by 15 bits, plus a constant."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def record_offsets(path: str, expected: int) -> np.ndarray:
    """(offset, length of the data) of every record in a TFRecord file, int64 [N, 2].

    Raises ConfigError for a truncated record, a damaged length, and a number of records other than `expected`.
    """
    records, offset = [], 0
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        while offset < size:
            file.seek(offset)
            header = file.read(HEADER)
            if len(header) < HEADER:
                raise damaged(path, f"the record at byte {offset} is truncated")
            if masked_checksum(header[:8]) != header[8:]:
                raise damaged(path, f"the length of the record at byte {offset} has the wrong checksum")
            (length,) = struct.unpack("<Q", header[:8])
            end = offset + HEADER + length + FOOTER
            if end > size:
                raise damaged(path, f"the record at byte {offset} is truncated")
            records.append((offset, length))
            offset = end
    if len(records) != expected:
        raise damaged(path, f"{len(records)} records, expected {expected}")
    return np.array(records, np.int64).reshape(-1, 2)
