"""The shared secret of a run: its processes authenticate with it at rank 0's control port.

The key is derived from the launcher's job id and either JAXDP_SECRET, which `jaxdp launch` sets for its processes, or a file of
random bytes that rank 0 writes into the working directory before it accepts a connection.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from jaxdp.distributed.launchers import Cluster, host_identity
from jaxdp.errors import NO_VALUE, ConfigError
from jaxdp.files import no_directory_reason, read_regular

VARIABLE = "JAXDP_SECRET"
MIN_CHARS = 16  # shorter secrets can be guessed by a passive listener
RANDOM_BYTES = 32
ENVIRONMENT, FILE = "environment", "file"  # sources of a secret
FIX = f"set {VARIABLE} to the same random value for every process (openssl rand -hex 32)"


class SecretUnavailable(Exception):
    """The secret file is missing or cannot be read (yet): one line with the reason."""


class Secret:
    """Access to the secret of a run. source: "environment" or "file"; warning: a line for rank 0 to log, or "".

    directory: shared by all processes. Raises ConfigError if JAXDP_SECRET is too short, or if there is neither
    JAXDP_SECRET nor a directory.
    """

    def __init__(self, cluster: Cluster, directory: Path | None = None, environment: Mapping[str, str] = os.environ) -> None:
        self.warning = ""
        self.source = ENVIRONMENT if environment.get(VARIABLE) or cluster.num_processes == 1 else FILE
        self._job, self._value = cluster.job, environment.get(VARIABLE, "")
        self._path = Path(directory or "", f".secret-{cluster.port}")
        self._created_directories: list[Path] = []
        self._content: bytes | None = None
        if self._value and len(self._value) < MIN_CHARS:
            reason = f"has {len(self._value)} characters, fewer than {MIN_CHARS}"
            raise ConfigError(VARIABLE, NO_VALUE, reason=reason, hint=FIX)
        if self.source == FILE and directory is None:
            raise ConfigError(
                VARIABLE,
                reason="is not set, and there is no shared working directory in which rank 0 could write a secret",
                hint=f"{FIX}, or start the processes with `jaxdp launch`, which sets it",
            )

    def create(self) -> bytes:
        """The key of the run, on rank 0; writes the secret file, readable by its owner only, if the source is a file."""
        if self.source == ENVIRONMENT:
            return self._key(self._value.encode() or secrets.token_bytes(RANDOM_BYTES))
        folder = self._path.parent
        temporary = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}")
        text = secrets.token_hex(RANDOM_BYTES).encode()
        try:
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._created_directories = missing
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                open_to_others = os.fstat(file.fileno()).st_mode & 0o077
            os.replace(temporary, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self.remove()
            reason = f"rank 0 cannot write the run's secret there ({no_directory_reason(folder, error)})"
            raise ConfigError("--workdir", str(folder), reason=reason, hint=f"choose a writable directory, or {FIX}") from None
        if open_to_others:
            self.warning = f"{self._path} can be read by other users (its file system keeps no permissions); {FIX}"
        self._content = text
        return self._key(text)

    def read(self) -> bytes:
        """The key of the run, on any other rank. Raises SecretUnavailable if the file is missing or cannot be read."""
        if self.source == ENVIRONMENT:
            return self._key(self._value.encode())
        try:
            with contextlib.suppress(OSError):
                os.listdir(self._path.parent)  # NFS otherwise caches for a minute that the file is missing
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
            with open(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_size != 2 * RANDOM_BYTES:
                    raise OSError(errno.EINVAL, "rank 0 did not write this file")
                if status.st_uid not in (os.geteuid(), 0, os.stat(self._path.parent).st_uid):
                    raise OSError(errno.EPERM, f"another user wrote it, uid {status.st_uid}")
                return self._key(file.read(2 * RANDOM_BYTES))
        except OSError as error:
            raise SecretUnavailable(f"cannot read rank 0's secret {str(self._path)!r} ({error.strerror})") from None

    def remove(self) -> None:
        """On rank 0, once all processes have joined or the start has failed: delete the file and the directories made for it.

        A file that another run has written in its place stays.
        """
        if self._content is not None:
            with contextlib.suppress(OSError):
                if read_regular(self._path, 2 * RANDOM_BYTES) == self._content:
                    self._path.unlink()
        self._content = None
        with contextlib.suppress(OSError):  # not empty any more
            for folder in self._created_directories:
                folder.rmdir()
        self._created_directories = []

    def fix(self, server_source: str = "") -> str:
        """What to change if rank 0 and this process have different secrets. server_source: where rank 0 reads its secret."""
        host = host_identity()[0]
        if server_source == ENVIRONMENT and self.source == FILE:
            return f"rank 0 has {VARIABLE} and this process does not: {FIX}"
        if server_source == FILE and self.source == ENVIRONMENT:
            return f"this process has {VARIABLE} and rank 0 does not: {FIX}, or unset it everywhere"
        if self.source == ENVIRONMENT:
            return f"{VARIABLE} differs between rank 0 and {host}: {FIX}"
        return f"choose a --workdir that all hosts share and this user can read, or {FIX}"

    def _key(self, material: bytes) -> bytes:
        return hmac.digest(hashlib.sha256(material).digest(), b"jaxdp control port\n" + self._job.encode(), "sha256")
