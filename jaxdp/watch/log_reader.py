"""Reads a growing metrics.jsonl: each time only what is new."""

import os
from pathlib import Path
from typing import Any

from jaxdp.files import open_regular
from jaxdp.records import is_plausible, parse_record

TAIL = 64  # bytes before the position that must be unchanged for the rest to be new
CHUNK = 2**22


class LogReader:
    """The records of a log and the number of its damaged lines, updated by `refresh`.

    A file that was replaced or truncated, as by a resumed run, is read again. A last line without its end is left for the next
    time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self.damaged = 0
        self._forget()

    def _forget(self) -> None:
        self.records, self.damaged = [], 0
        self._inode, self._position, self._tail, self._torn = 0, 0, b"", b""

    def refresh(self) -> None:
        """Read what was appended since the last call. Raises OSError if the file cannot be read; a missing one is empty."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            self._forget()
            return
        with file:
            status = os.fstat(file.fileno())
            if not self._continues(file, status):
                self._forget()
                self._inode = status.st_ino
            file.seek(self._position)
            while data := file.read(CHUNK):
                self._position += len(data)
                self._tail = (self._tail + data)[-TAIL:]
                *lines, self._torn = (self._torn + data).split(b"\n")
                for line in lines:
                    record = parse_record(line.decode(errors="replace") + "\n")
                    if record is not None and is_plausible(record):
                        self.records.append(record)
                    else:
                        self.damaged += 1

    def _continues(self, file: Any, status: os.stat_result) -> bool:
        """Whether the file is the one that was read, possibly with more at its end."""
        if status.st_ino != self._inode or status.st_size < self._position:
            return False
        file.seek(self._position - len(self._tail))
        return file.read(len(self._tail)) == self._tail
