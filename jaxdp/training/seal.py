"""Seals: by which a checkpoint is known to be whole, and to be what was written.

A checkpoint is a directory named by its samples seen: `state/`, Orbax's, and `seal.json`, written last, with what the run knew,
the size and checksum of every file, and a digest of every array.
"""

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxdp.training.guard import TrainingError

SEAL, STATE = "seal.json", "state"


class Damaged(Exception):
    """A checkpoint that must not be used: one line that names it, the file or array, and what is wrong."""


class Unreadable(TrainingError):
    """A checkpoint that could not be read now, and may be sound: nothing is done to it."""


@dataclass(frozen=True)
class Sealed:
    """A checkpoint with its seal. told: what the run knew, a dict that JSON can hold."""

    path: Path
    samples: int
    told: dict
    arrays: dict[str, list]
    files: dict[str, list]

    @property
    def accuracy(self) -> float | None:
        return self.told.get("accuracy")

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def directories(folder: Path) -> list[Path]:
    """What may be checkpoints in a folder, the newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.name.isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def read(path: Path) -> Sealed:
    """The seal of a checkpoint. Raises Damaged where it is missing or damaged."""
    try:
        text = (path / SEAL).read_bytes()
    except OSError as error:
        raise _unreadable(path / SEAL, error) from None
    body, _, digest = text.rstrip(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise Damaged(f"{path / SEAL} is damaged")
    held = json.loads(body)
    return Sealed(path, held["samples"], held["told"], held["arrays"], held["files"])


def _unreadable(file: Path, error: OSError) -> Exception:
    """What is not there is damage; what cannot be read for another reason may be read the next time."""
    kind = Damaged if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)) else Unreadable
    return kind(f"{file} cannot be read: {error.strerror}")


def write(sealed: Sealed) -> None:
    held = {"samples": sealed.samples, "told": sealed.told, "arrays": sealed.arrays, "files": sealed.files}
    body = json.dumps(held, indent=1).encode()
    temporary = sealed.path / (SEAL + ".tmp")
    with open(temporary, "wb") as file:
        file.write(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, sealed.path / SEAL)


def checksum(path: Path) -> list:
    """[bytes, CRC-32 in hexadecimal] of a file."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, f"{crc:08x}"]


def state_files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in (path / STATE).rglob("*") if file.is_file())


def check_files(sealed: Sealed) -> None:
    """Raise Damaged, naming the file, if one that was sealed is missing or not what it was."""
    for name, expected in sealed.files.items():
        file = sealed.path / name
        try:
            found = checksum(file)
        except OSError as error:
            raise _unreadable(file, error) from None
        if found != expected:
            what = "truncated" if found[0] < expected[0] else "changed"
            raise Damaged(f"{file} is damaged: {what} since it was written")


def all_sealed(folder: Path) -> Iterator[Sealed]:
    """The checkpoints whose seals are sound, the newest first; their files are not looked at.

    Those with a damaged seal are passed over here: `restore` and `jaxdp checkpoints` name them.
    """
    for path in directories(folder):
        with contextlib.suppress(Damaged, Unreadable):
            yield read(path)


def is_sound(sealed: Sealed) -> bool:
    """Whether every file is what was sealed."""
    try:
        check_files(sealed)
    except (Damaged, Unreadable):
        return False
    return True


def newest_good(folder: Path, before: int | None = None) -> Sealed | None:
    """The newest sound one, of at most `before` samples."""
    return next((one for one in all_sealed(folder) if (before is None or one.samples <= before) and is_sound(one)), None)


def by_accuracy(sealed: list[Sealed]) -> list[Sealed]:
    """Those that were saved right after an evaluation, the best first, of equals the latest."""
    scored = [one for one in sealed if one.accuracy is not None]
    return sorted(scored, key=lambda one: (one.accuracy, one.samples), reverse=True)
