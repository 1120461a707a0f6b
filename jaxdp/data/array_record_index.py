"""Byte ranges of the records in an array_record file, from its last bytes: array_record's own reader does not return them.

The file consists of chunks, and a header precedes every 64 KiB (riegeli_records_file_format.md of github.com/google/riegeli).
The last 64 KiB begin with a chunk that states where the footer is. The footer states where the chunk of every record is.
"""

import struct

import numpy as np

BLOCK, BLOCK_HEADER, CHUNK_HEADER = 2**16, 24, 40
POSTSCRIPT_BYTES = 256  # that hold the chunk at the start of the last block
SIMPLE, UNCOMPRESSED, ZSTD = ord("r"), 0, ord("z")
FIRST_FIELD, MAGIC_FIELD, MAGIC = 1, 2, 0x71930E704FDAE05E
RECORDS_FIELD = 3


class UnknownFormatError(ValueError):
    """A file that is no array_record file, or has an unknown kind of index; the message is the reason."""


def footer_start(size: int, postscript: bytes) -> int:
    """Where the footer starts. size: of the file; postscript: the first POSTSCRIPT_BYTES bytes of its last BLOCK."""
    fields = _fields(_records(postscript, size - BLOCK)[0])
    start = fields.get(FIRST_FIELD, -1)
    if fields.get(MAGIC_FIELD) != MAGIC or not 0 < start < size - BLOCK:
        raise UnknownFormatError("it does not end as an array_record file")
    return start


def record_ranges(footer: bytes, start: int) -> np.ndarray:
    """(first byte, byte after the last one) of the chunk that holds each record, int64 [N, 2].

    footer: the bytes of the file from `start`, where the footer starts, to its last BLOCK.
    """
    chunks = [_fields(record) for record in _records(footer, start)[1:]]
    try:
        starts = np.array([chunk[FIRST_FIELD] for chunk in chunks] + [start], np.int64)
        counts = [chunk[RECORDS_FIELD] for chunk in chunks]
    except (KeyError, OverflowError):
        raise UnknownFormatError("its index is damaged") from None
    if (np.diff(starts) <= 0).any():
        raise UnknownFormatError("its index is damaged")
    return np.repeat(np.stack([starts[:-1], starts[1:]], axis=1), counts, axis=0)


def _records(data: bytes, position: int) -> list[bytes]:
    """The records of the chunk at the start of `data`, which is at `position` in the file."""
    try:
        length, kind_and_count = struct.unpack("<8xQ8xQ8x", _take(data, position, CHUNK_HEADER))
        content = _take(data, position, CHUNK_HEADER + length)[CHUNK_HEADER:]
        if kind_and_count % 256 != SIMPLE:
            raise UnknownFormatError("its index is of an unknown kind")
        size, offset = _varint(content, 1)
        sizes = _decompress(content[0], content[offset : offset + size])
        values = _decompress(content[0], content[offset + size :])
        records, at, start = [], 0, 0
        for _ in range(kind_and_count // 256):
            size, at = _varint(sizes, at)
            records.append(values[start : start + size])
            start += size
        return records
    except (IndexError, struct.error):
        raise UnknownFormatError("its index is damaged") from None


def _take(data: bytes, position: int, size: int) -> bytes:
    """The first `size` bytes of `data` without block headers."""
    taken, at = bytearray(), 0
    while len(taken) < size:
        if (position + at) % BLOCK == 0:
            at += BLOCK_HEADER
        length = min(size - len(taken), BLOCK - (position + at) % BLOCK)
        piece = data[at : at + length]
        if len(piece) < length:
            raise IndexError
        taken += piece
        at += length
    return bytes(taken)


def _decompress(kind: int, data: bytes) -> bytes:
    if kind == UNCOMPRESSED:
        return data
    if kind != ZSTD:
        raise UnknownFormatError("its index is compressed in an unknown way")
    import zstandard

    size, offset = _varint(data, 0)
    try:
        return zstandard.ZstdDecompressor().decompress(data[offset:], max_output_size=size)
    except zstandard.ZstdError:
        raise UnknownFormatError("its index is damaged") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(number, position after it) of a protocol buffer's variable-length integer."""
    number = shift = 0
    while True:
        if at >= len(data):
            raise UnknownFormatError("its index is damaged")
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at


def _fields(message: bytes) -> dict[int, int]:
    """The integer fields of a protocol buffer message."""
    fields, at = {}, 0
    while at < len(message):
        key, at = _varint(message, at)
        number, at = _varint(message, at)
        if key & 7 == 2:
            at += number
        else:
            fields[key >> 3] = number
    return fields
