"""The file that a command is asked to write: refused before the work, where it could not be written after it."""

import os
from pathlib import Path

from jaxdp.config import ConfigError


def file_to_write(flag: str, given: str, overwrite: bool) -> Path:
    """The path that a flag names, its directory made. Raises ConfigError where no file may be written there."""
    path, refused = Path(given), f"{flag}: {given!r} is not allowed"
    if not given:
        raise ConfigError(f"{refused}; give a file")
    if path.is_dir():
        raise ConfigError(f"{refused}; it is a directory; give a file")
    if path.exists() and not overwrite:
        raise ConfigError(f"{refused}; it is there already; give another file, or --overwrite")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{refused}; {path.parent} cannot be made ({error.strerror}); give another file") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{refused}; {path.parent} cannot be written; give another file")
    return path
