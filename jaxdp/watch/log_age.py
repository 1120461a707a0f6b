"""The age of a file, for people. Nothing is decided by it: both clocks can be set."""

import os
import time
from pathlib import Path


def seconds_since_written(path: Path) -> float | None:
    """Seconds since a file was last written, by the clocks of this machine and of the file system; None without the file."""
    try:
        return max(0.0, time.time() - os.stat(path).st_mtime)
    except OSError:
        return None
