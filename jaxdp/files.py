"""Files that a command writes where its user says: looked at before the work, and whole or not there after it."""

import os
import secrets
from pathlib import Path

from jaxdp.config import ConfigError


def check_output(output, overwrite: bool, field: str = "--output") -> Path:
    """The path of a file that may be written. Raises ConfigError, naming `field`, where it may not.

    A pipe or a device needs no `overwrite`: it is written into.
    """
    if not str(output):
        raise ConfigError(f"{field}: '' is not allowed; give a file")
    output, refused = Path(output), f"{field}: {str(output)!r} is not allowed"
    if output.is_dir():
        raise ConfigError(f"{refused}; it is a directory; give a file")
    if output.is_file() and not overwrite:
        raise ConfigError(f"{refused}; it is there already; give another file, or --overwrite")
    if output.exists() and not output.is_file():
        return output
    folder = output.resolve().parent
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ConfigError(f"{refused}; {str(there)!r} is no folder that can be written to; give a file in another one")
    return output


def write_whole(path: Path, data: bytes) -> None:
    """The file has its old content or the new one at every moment, and its folder is made where it is missing.

    A link stays one, and the file that it names is written; a pipe or a device is written into. Raises OSError with the name.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")  # no file of the user's
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
