"""The directories of local copies of runs and data at URLs."""

import hashlib
import re
import tempfile
from pathlib import Path

from jaxdp.config import Storage
from jaxdp.errors import ConfigError
from jaxdp.files import check_no_password, expand_user, no_directory_reason, user_cache


def local_directory(storage: Storage) -> Path:
    """The directory of local copies. Raises ConfigError if the home directory is needed and unknown."""
    if storage.directory != "auto":
        return Path(expand_user(storage.directory, "storage.directory"))
    if (cache := user_cache()) is None:
        reason, hint = "the home directory of this user is unknown", "set HOME, XDG_CACHE_HOME or --storage.directory"
        raise ConfigError("storage.directory", storage.directory, reason=reason, hint=hint)
    return cache / "storage"


def temporary_directory(storage: Storage) -> tempfile.TemporaryDirectory:
    """A directory for copies that one command needs."""
    root = local_directory(storage) / "temporary"
    try:
        root.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=root)
    except OSError as error:
        raise ConfigError("storage.directory", str(root), reason=no_directory_reason(root, error)) from None


def run_copy(storage: Storage, url: str) -> Path:
    """The directory of a run's local copy. Raises ConfigError for a URL with a password, which its name would show."""
    check_no_password(url, "--workdir")
    words = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[-80:]
    return local_directory(storage) / "runs" / f"{words}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
