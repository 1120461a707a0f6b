"""Checkpoint manifest: file checksums and array checksums, written last.

A checkpoint is a directory named by the number of samples seen. It holds `state/`, written by Orbax, and `manifest.json` with
the run's metadata, the size and checksum of every file, and dtype, shape and checksum of every array. Several processes write
`state/part-RANK/`, each with some of the arrays.
"""

import errno
import hashlib
import json
import os
import re
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from jaxdp.checkpoint.progress import Progress
from jaxdp.errors import TrainingError
from jaxdp.files import NotRegularError, open_regular, read_regular, write_atomically

MANIFEST, STATE = "manifest.json", "state"


class CorruptCheckpoint(Exception):
    """A checkpoint with missing or changed content. The message names the checkpoint, the file or array, and the defect."""


class UnreadableCheckpoint(TrainingError):
    """A checkpoint that could not be read for another reason, such as missing permission. It may be valid and is kept."""


def _check_inside(name: str) -> str:
    """Accept only relative paths inside the state folder."""
    parts = name.split("/")
    if parts[0] != STATE or not all(parts) or ".." in parts:
        raise ValueError(f"{name!r} is not a path in {STATE}/")
    return name


def _check_required(progress: Any) -> Any:
    for name in ("samples", "steps"):  # the other fields have defaults
        if isinstance(progress, dict) and name not in progress:
            raise ValueError(f"{name} is missing")
    return progress


def _check_range(progress: Progress) -> Progress:
    for name in ("samples", "steps"):
        if not 0 <= getattr(progress, name) < 2**63:
            raise ValueError(f"{name} is {getattr(progress, name)}, not between 0 and 2**63 - 1")
    return progress


class _Metadata(BaseModel):
    """Required and optional fields of `Manifest.metadata`; other fields are allowed."""

    progress: Annotated[Progress, BeforeValidator(_check_required), AfterValidator(_check_range)]
    config: dict
    epoch: Annotated[float, Field(allow_inf_nan=False)]
    evaluation: dict[str, float] | None = None
    data: dict[str, str] | None = None
    per_worker_batch: dict[str, tuple[int, int | None]] | None = None


class _ManifestFile(BaseModel):
    """The content of manifest.json. arrays: dtype, shape and checksum by path; files: bytes and checksum by name."""

    samples: Annotated[int, Field(ge=0)]
    metadata: _Metadata
    arrays: dict[str, tuple[str, list[int], str]]
    files: dict[Annotated[str, AfterValidator(_check_inside)], tuple[Annotated[int, Field(ge=0)], str]]
    parts: Annotated[int, Field(ge=1, lt=2**31)] = 1


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's manifest.

    path: the checkpoint's directory. samples: number of samples seen. metadata: JSON-compatible dict with the run's progress,
    config, epoch and evaluation, the record of one at this position or None. arrays: path -> [dtype, shape, checksum]. files:
    name -> [bytes, checksum]. parts: number of processes that wrote the state, each a part of the arrays. url: where the
    checkpoint was downloaded from.
    """

    path: Path
    samples: int
    metadata: dict
    arrays: dict[str, list]
    files: dict[str, list]
    parts: int = 1
    url: str | None = None

    @property
    def location(self) -> str:
        """Where the checkpoint is, for messages: its URL or its directory."""
        return self.url or str(self.path)

    @property
    def accuracy(self) -> float | None:
        """Held-out accuracy in [0, 1]; None if the checkpoint was not saved right after an evaluation."""
        return self.metric("eval_accuracy")

    def metric(self, name: str) -> float | None:
        """A metric of the held-out images, such as eval_loss; None without an evaluation, and if that lacks the metric."""
        return (self.metadata.get("evaluation") or {}).get(name)

    @property
    def epoch(self) -> float:
        return self.metadata["epoch"]

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def is_checkpoint_name(name: str) -> bool:
    """Whether a directory's name is a plain decimal number, as a checkpoint's is."""
    return re.fullmatch("0|[1-9][0-9]*", name) is not None


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`.

    Raises CorruptCheckpoint if it is missing, damaged or belongs to another checkpoint, or if `path` is a link or no directory;
    UnreadableCheckpoint on other I/O errors.
    """
    file = path
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
        file = path / MANIFEST
        text = read_regular(file) if is_folder else b""
    except OSError as error:
        raise _read_error(file, error) from None
    if not is_folder:
        raise CorruptCheckpoint(f"{path} is corrupt: it is not a directory; links are not followed")
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Path) -> Manifest:
    """The manifest with the content `text` of the checkpoint at `path`. Raises CorruptCheckpoint."""
    file = path / MANIFEST
    body, _, digest = text.rstrip(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CorruptCheckpoint(f"{file} is corrupt: wrong checksum")
    try:
        _ManifestFile.model_validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "content"
        raise CorruptCheckpoint(f"{file} is corrupt: {field}: {first['msg']}") from None
    fields = json.loads(body)
    if is_checkpoint_name(path.name) and path.name != str(fields["samples"]):
        raise CorruptCheckpoint(f"{path} is corrupt: its {MANIFEST} belongs to the checkpoint of {fields['samples']} samples")
    progress_samples = fields["metadata"]["progress"]["samples"]
    if progress_samples != fields["samples"]:
        raise CorruptCheckpoint(
            f"{file} is corrupt: samples is {fields['samples']}, but metadata.progress.samples is {progress_samples}"
        )
    return Manifest(
        path, fields["samples"], fields["metadata"], fields["arrays"], fields["files"], parts=fields.get("parts", 1)
    )


def _read_error(file: Path, error: OSError) -> Exception:
    """A missing or irregular file means corruption; any other error may be temporary."""
    corrupt = isinstance(error, NotRegularError) or error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EFBIG)
    kind = CorruptCheckpoint if corrupt else UnreadableCheckpoint
    return kind(f"{file} cannot be read: {error.strerror}")


def write_manifest(manifest: Manifest) -> None:
    """Write manifest.json, followed by a line with its SHA-256, and sync it to the disk. Raises OSError."""
    fields = {name: getattr(manifest, name) for name in ("samples", "metadata", "arrays", "files", "parts")}
    body = json.dumps(fields, indent=1).encode()
    content = body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"
    write_atomically(manifest.path / MANIFEST, content, sync=True)


def file_checksum(path: Path, expected_bytes: int | None = None) -> list:
    """[bytes, CRC-32 in hexadecimal] of a file; [bytes, None], without reading it, if its size is not `expected_bytes`."""
    num_bytes, crc = 0, 0
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if expected_bytes is not None and size != expected_bytes:
            return [size, None]
        while num_bytes <= size and (chunk := file.read(2**22)):
            num_bytes, crc = num_bytes + len(chunk), zlib.crc32(chunk, crc)
    return [num_bytes, f"{crc:08x}"]


def state_files(path: Path, folder: str = STATE) -> list[str]:
    """Names of all files in the state folder of the checkpoint at `path`, or in a part of it, sorted."""
    return sorted(str(file.relative_to(path)) for file in (path / folder).rglob("*") if file.is_file())


def verify_files(manifest: Manifest) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises CorruptCheckpoint, naming the file, if one is missing, changed or not a regular file (on which Orbax might block).
    """
    for file in manifest.path.rglob("*"):
        if file.is_symlink() or not (file.is_file() or file.is_dir()):
            raise CorruptCheckpoint(f"{file} is corrupt: it is not a regular file; links are not followed")
    for name, expected in manifest.files.items():
        file = manifest.path / name
        try:
            actual = file_checksum(file, expected[0])
        except OSError as error:
            raise _read_error(file, error) from None
        if actual[0] > expected[0]:
            raise CorruptCheckpoint(f"{file} is corrupt: it is longer than the {expected[0]:,} bytes that were written")
        if actual != expected:
            defect = "truncated" if actual[0] < expected[0] else "changed"
            raise CorruptCheckpoint(f"{file} is corrupt: it was {defect} after it was written")
