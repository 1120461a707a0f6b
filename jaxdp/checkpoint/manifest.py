"""Checkpoint manifest: metadata of the run, checksums of every file and array, written last.

A checkpoint is a directory named by the number of samples seen. It holds `manifest.json` and `state/`, written by Orbax.
Several processes write `state/part-RANK/`, each with some of the arrays.
"""

import errno
import hashlib
import json
import os
import re
import stat
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError

from jaxdp.checkpoint.progress import Progress
from jaxdp.config import Config, unfrozen
from jaxdp.errors import ConfigError, TrainingError
from jaxdp.files import NotRegularError, open_regular, read_regular, write_atomically
from jaxdp.validation import from_dict

MANIFEST, STATE = "manifest.json", "state"


class CheckpointError(Exception):
    """A checkpoint that cannot be used."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint with missing or changed content. The message names the checkpoint, the file or array, and the defect."""


class UnreadableCheckpoint(TrainingError, CheckpointError):
    """A checkpoint that could not be read for a different reason, such as missing permission. It may be valid and is kept."""


def _check_inside(name: str) -> str:
    """Accept only relative paths inside the state folder that a file can have."""
    parts = name.split("/")
    if parts[0] != STATE or not all(parts) or ".." in parts or not name.isprintable():
        raise ValueError(f"{name!r} is not a path in {STATE}/")
    return name


class _Metadata(BaseModel):
    """Required and optional fields of `Manifest.metadata`; other fields are allowed."""

    progress: Progress
    config: dict
    epoch: Annotated[FiniteFloat, Field(ge=0)]
    evaluation: dict[str, float] | None = None
    data: dict[str, str] | None = None
    versions: dict[str, str] = {}
    per_worker_batch: dict[str, tuple[PositiveInt, PositiveInt]] | None = None


class _ManifestFile(BaseModel):
    """The content of manifest.json: see `Manifest`."""

    samples: NonNegativeInt
    metadata: _Metadata
    arrays: dict[str, tuple[str, list[int], str]]
    files: dict[Annotated[str, AfterValidator(_check_inside)], tuple[NonNegativeInt, str]]
    parts: Annotated[int, Field(ge=1, lt=2**31)]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's manifest. path: the checkpoint's directory. url: where it was downloaded from.

    metadata: JSON-compatible dict with the run's progress, config, epoch and evaluation (the record of an evaluation at this
    position, or None). arrays: path -> [dtype, shape, checksum]. files: name -> [bytes, checksum]. parts: number of processes
    that wrote the state; each wrote a part of the arrays.
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
    def config(self) -> Config:
        """The config of the run. Raises ConfigError if it comes from a version with different fields."""
        try:
            return from_dict(self.metadata["config"])
        except ConfigError as error:
            hint = "use the version of jaxdp that saved it, or start a new run"
            raise ConfigError("checkpoint", self.location, reason=f"its config cannot be read ({error})", hint=hint) from None

    def config_of_state(self, config: Config) -> Config:
        """The config of the stored state, of a run with `config`: before or after unfreezing."""
        return unfrozen(config) if self.metadata["progress"].get("unfrozen") else config

    @property
    def evaluation(self) -> dict[str, float]:
        """The record of the evaluation right before the checkpoint was saved; {} without one."""
        return self.metadata.get("evaluation") or {}

    @property
    def epoch(self) -> float:
        return self.metadata["epoch"]

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def is_checkpoint_name(name: str) -> bool:
    """Whether a directory's name is a plain decimal number, like a checkpoint's."""
    return re.fullmatch("0|[1-9][0-9]*", name) is not None


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises CorruptCheckpoint if it is missing, damaged or from a different
    checkpoint, or if `path` is a link or no directory. Raises UnreadableCheckpoint on other I/O errors."""
    file = path
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise CorruptCheckpoint(f"{path} is corrupt: it is not a directory; links are not followed")
        file = path / MANIFEST
        return parse_manifest(read_regular(file), path)
    except OSError as error:
        raise _read_error(file, error) from None


def parse_manifest(text: bytes, path: Path) -> Manifest:
    """The manifest with the content `text` of the checkpoint at `path`. Raises CorruptCheckpoint."""
    file = path / MANIFEST
    body, _, digest = text.rstrip(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CorruptCheckpoint(f"{file} is corrupt: wrong checksum")
    try:
        checked = _ManifestFile.model_validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "content"
        raise CorruptCheckpoint(f"{file} is corrupt: {field}: {first['msg']}") from None
    fields = json.loads(body)
    progress = asdict(checked.metadata.progress) | fields["metadata"]["progress"]  # keeps numbers as written
    fields["metadata"]["progress"] = progress
    samples, counted, epoch = fields["samples"], progress["samples"], fields["metadata"]["epoch"]
    if is_checkpoint_name(path.name) and path.name != str(samples):
        raise CorruptCheckpoint(f"{path} is corrupt: its {MANIFEST} belongs to the checkpoint of {samples} samples")
    if counted != samples:
        raise CorruptCheckpoint(f"{file} is corrupt: samples is {samples}, but metadata.progress.samples is {counted}")
    if not epoch <= samples < 2**63 * epoch + 1:  # an epoch has at least one image
        raise CorruptCheckpoint(f"{file} is corrupt: metadata.epoch is {epoch:g} after {samples} samples")
    return Manifest(path, **{name: fields[name] for name in _ManifestFile.model_fields})


def _read_error(file: Path, error: OSError) -> CheckpointError:
    """A missing or irregular file means corruption; any other error may be temporary."""
    corrupt = isinstance(error, NotRegularError) or error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EFBIG)
    kind = CorruptCheckpoint if corrupt else UnreadableCheckpoint
    return kind(f"{file} cannot be read: {error.strerror}")


def write_manifest(manifest: Manifest) -> None:
    """Write manifest.json, followed by a line with its SHA-256, and sync it to the disk. Raises OSError."""
    body = json.dumps({name: getattr(manifest, name) for name in _ManifestFile.model_fields}, indent=1).encode()
    write_atomically(manifest.path / MANIFEST, body + f"\n{hashlib.sha256(body).hexdigest()}\n".encode(), sync=True)


def state_files(path: Path, part: int, parts: int) -> list[str]:
    """Names of the files of a part of the state of the checkpoint at `path`, sorted."""
    return sorted(str(file.relative_to(path)) for file in (path / part_folder(part, parts)).rglob("*") if file.is_file())


def part_folder(part: int, parts: int) -> str:
    """The folder of a part of the state in a checkpoint that `parts` processes have written."""
    return STATE if parts == 1 else f"{STATE}/part-{part}"


def file_checksum(path: Path, expected_bytes: int | None = None) -> list:
    """[bytes, CRC-32 in hexadecimal] of a file; [bytes, None], unread, if its size is not `expected_bytes`."""
    num_bytes, crc = 0, 0
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if expected_bytes is not None and size != expected_bytes:
            return [size, None]
        while num_bytes <= size and (chunk := file.read(2**22)):
            num_bytes, crc = num_bytes + len(chunk), zlib.crc32(chunk, crc)
    return [num_bytes, f"{crc:08x}"]


def verify_files(manifest: Manifest, below: str = "") -> None:
    """Compare every file of a checkpoint whose name begins with `below` with its manifest.

    Raises CorruptCheckpoint, naming the file, if one is missing, changed or not a regular file (Orbax might block on that).
    """
    for file in manifest.path.rglob("*"):
        if file.is_symlink() or not (file.is_file() or file.is_dir()):
            raise CorruptCheckpoint(f"{file} is corrupt: it is not a regular file; links are not followed")
    for name, [size, checksum] in manifest.files.items():
        if name.startswith(below):
            file = manifest.path / name
            try:
                actual = file_checksum(file, size)
            except OSError as error:
                raise _read_error(file, error) from None
            if actual != [size, checksum]:
                defect = "made longer" if actual[0] > size else "truncated" if actual[0] < size else "changed"
                raise CorruptCheckpoint(f"{file} is corrupt: it was {defect} after it was written")
