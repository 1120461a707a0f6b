"""Random access to the examples in array_record and TFRecord files, without TensorFlow; files are checked when opened."""

import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import numpy as np

from jaxdp.data.decode import ImageError
from jaxdp.errors import ConfigError, first_line
from jaxdp.files import allow_open_files, open_regular

HEADER, FOOTER = 12, 4  # bytes around a TFRecord's data: its length with a checksum, and the checksum of the data
CHECK_THREADS = 8


class Records:
    """Decoded features of each example of a split, except that images stay encoded.

    warnings: what users should know. wait_seconds: for how long threads have waited for records that are not on this machine.
    """

    warnings: Sequence[str] = ()
    wait_seconds = 0.0

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def start(self) -> None:
        """Check files that `open` has not checked. Raises ConfigError for damaged ones."""

    def read_ahead(self, order: Iterable[np.ndarray]) -> None:
        """Fetch records in this order from now on. order: arrays of indices."""

    def stop_reading(self) -> None:
        """Let threads that wait for a record raise InterruptedError."""


class ArrayRecords(Records):
    """tensorflow-datasets' own reader of array_record files.

    Constructed by `open`; builder, split: of tensorflow-datasets; instructions: its `FileInstruction`s.
    """

    def __init__(self, source: Sequence) -> None:
        self.source = source

    @classmethod
    def open(cls, builder: Any, split: str, instructions: Sequence[Any]) -> "ArrayRecords":
        """Check all files, then open them. Raises ConfigError for a damaged file."""
        with ThreadPoolExecutor(CHECK_THREADS) as threads:
            paths, expected = [str(file.filename) for file in instructions], [file.examples_in_shard for file in instructions]
            list(threads.map(check_array_record, paths, expected))
        allow_open_files(len(instructions))
        return cls(builder.as_data_source(split, decoders=skip_image_decoding()))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[int(index)]


class TFRecords(Records):
    """Random access to TFRecord files through the offsets of their records, which `open` collects from the headers.

    offsets: for each file, (offset, length of the data) of the split's records, int64 [N, 2].
    """

    def __init__(self, features: Any, paths: list[str], offsets: list[np.ndarray]) -> None:
        self.features, self.paths, self.offsets = features, paths, offsets
        self.decoders = skip_image_decoding()
        self.starts = [0]
        for rows in offsets:
            self.starts.append(self.starts[-1] + len(rows))

    @classmethod
    def open(cls, builder: Any, split: str, instructions: Sequence[Any]) -> "TFRecords":
        """Read the headers of all files. Raises ConfigError for a damaged file."""
        paths = [str(file.filename) for file in instructions]
        with ThreadPoolExecutor(CHECK_THREADS) as threads:
            offsets = list(threads.map(record_offsets, paths, [file.examples_in_shard for file in instructions]))
        used = [rows[file.skip : file.skip + count_examples(file)] for rows, file in zip(offsets, instructions, strict=True)]
        return cls(builder.info.features, paths, used)

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = bisect_right(self.starts, index) - 1
        offset, length = self.offsets[shard][index - self.starts[shard]].tolist()
        with open_regular(self.paths[shard]) as file:
            raw = os.pread(file.fileno(), length + FOOTER, offset + HEADER)
        if masked_checksum(raw[:length]) != raw[length:]:
            raise ImageError(f"checksum mismatch in {self.paths[shard]}")
        return self.features.deserialize_example_np(raw[:length], decoders=self.decoders)


READERS: dict[str, type[ArrayRecords] | type[TFRecords]] = {"array_record": ArrayRecords, "tfrecord": TFRecords}


def skip_image_decoding() -> dict[str, Any]:
    import tensorflow_datasets as tfds

    return {"image": tfds.decode.SkipDecoding()}


def count_examples(instruction: Any) -> int:
    """Examples that a FileInstruction takes; its `take` is -1 for all after `skip`."""
    return instruction.take if instruction.take >= 0 else instruction.examples_in_shard - instruction.skip


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
