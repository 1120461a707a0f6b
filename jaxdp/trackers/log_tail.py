"""Reads a log that grows, record by record."""

import json
from pathlib import Path
from typing import Any

from jaxdp.files import open_regular

READ_BYTES = 2**18  # at once, so that a long log is sent in parts


class LogTail:
    """The records of a log in order. Keeps the file open: a later session replaces the log of a killed one."""

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)
        self._line = b""

    def read(self) -> list[dict[str, Any]]:
        """The next complete records, of at most `READ_BYTES`; [] if there are none now. Damaged lines are left out."""
        records: list[dict[str, Any]] = []
        while not records and (data := self._file.read(READ_BYTES)):
            *lines, self._line = (self._line + data).split(b"\n")
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and isinstance(record.get("samples"), int):
                    records.append(record)
        return records

    def rewind(self) -> None:
        """Start over at the first record."""
        self._file.seek(0)
        self._line = b""

    def __enter__(self) -> "LogTail":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
