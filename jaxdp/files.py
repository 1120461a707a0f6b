"""Reading of regular local files, and atomic writes, at paths given by the user; outputs that cannot be written."""

import contextlib
import errno
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxdp.errors import ConfigError

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*:/")  # fsspec's too: simplecache::s3://BUCKET
# (protocol, password before the host; of http also a name alone); no port after a host, no ARN, no address of IPv6
PASSWORD = re.compile(r"(.*?:/{1,2})(?!/|arn:)([^/@:\[]*:(?!\d{1,5}/).*|(?<=http://)[^/@]*|(?<=https://)[^/@]*)@")
# The names of secrets hold one of these anywhere (but for tokenizer and author), or one of the short ones as a whole word.
SECRET = (
    r"passw|passphrase|secret|credential|bearer|(?:api|access|account|private).?key|token(?!i[sz])|auth(?!or(?!i[sz]))|"
    r"(?<![a-z])(?:sig|signature|key|pw|pwd|pass|jwt)(?![a-z])"
)
QUERY = re.compile(rf"([?&#][^=&#]*(?:{SECRET})[^=&#]*=)[^&#]*", re.IGNORECASE)  # in a URL, with its name before it
PASSWORD_HINTS = {
    "logging.mlflow": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    **dict.fromkeys(("s3", "s3a"), "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"),
    **dict.fromkeys(("gs", "gcs"), "set GOOGLE_APPLICATION_CREDENTIALS to a file with them"),
}
RUNS, CONFIG = "runs", "config.json"  # the folder of runs by default; the file that every run directory has
LOG, RESULT, CHECKPOINTS = "metrics.jsonl", "result.json", "checkpoints"  # what it has later
LARGEST = 2**30  # largest file to read, in bytes: a sparse file may claim any size


class NotRegularError(OSError):
    """A pipe, device, socket or directory in place of a file: reading it could block or never end."""


def known_recipes() -> dict[str, Path]:
    """The files of the recipes by name, in ./configs, then in configs of the checkout or of the package."""
    package = Path(__file__).parent
    directories = [Path("configs"), package.parent / "configs", package / "configs"]
    files = [file for directory in directories for file in sorted(directory.glob("*.py"))]
    return {file.stem: file for file in reversed(files)}  # the first directory has precedence


def is_url(path: object) -> bool:
    return URL.match(str(path).lstrip()) is not None


def check_no_password(url: object, field: str) -> None:
    """Raise ConfigError, naming `field`, for a URL with a password or key, before a host or in a query: it would be stored."""
    text = str(url).strip()
    if (match := URL.match(text)) and (shown := PASSWORD.sub(r"\1...@", QUERY.sub(r"\1...", text))) != text:
        name = field.removeprefix("--")
        protocol = match[0].lower().removesuffix(":/").rpartition("::")[2]  # the last: simplecache::s3://BUCKET
        hint = PASSWORD_HINTS.get(name if name in PASSWORD_HINTS else protocol, "give the URL without it")
        raise ConfigError(field, shown, reason="must not hold a password or key, which would be stored and shown", hint=hint)


def check_local(path: object, field: str) -> None:
    """Raise ConfigError, naming `field`, for a URL, which would otherwise become a local directory such as `gs:`."""
    if is_url(path):
        check_no_password(path, field)
        raise ConfigError(field, str(path), reason="URLs are not supported", hint="use a local path")


def expand_user(path: str | os.PathLike, field: str) -> str:
    """A path with ~ or ~USER at its start replaced by that home directory, as a shell does; a URL stays.

    Raises ConfigError, naming `field`, if the home directory of this user is unknown.
    """
    text = os.fspath(path)
    if text.startswith("~") and (expanded := os.path.expanduser(text)) != text:
        return expanded
    if text.partition("/")[0] == "~":
        raise ConfigError(
            field, text, reason="the home directory of this user is unknown", hint="set HOME, or write the whole path"
        )
    return text


def user_cache() -> Path | None:
    """The directory of jaxdp's caches: jaxdp in XDG_CACHE_HOME or ~/.cache; None if the home directory is unknown."""
    try:
        return Path(expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME")) / "jaxdp"
    except ConfigError:
        return None


def is_run(path: str | Path) -> bool:
    """Whether a directory holds a run."""
    return (Path(path) / CONFIG).is_file()


def open_regular(path: str | Path, mode: str = "rb") -> IO[bytes]:
    """Open a regular file for reading ("rb") or for unbuffered appending ("ab", created if missing); follows links.

    Raises NotRegularError for anything but a regular file, without opening it, and OSError like `open`.
    """
    try:
        _check_regular(os.stat(path), path)
    except FileNotFoundError:
        if mode == "rb":
            raise
    flags = {"rb": os.O_RDONLY, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}[mode]
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_regular(os.fstat(descriptor), path)  # the file may have been replaced
        return open(descriptor, mode, buffering=-1 if mode == "rb" else 0)
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise NotRegularError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise NotRegularError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: str | Path, most: int = LARGEST) -> bytes:
    """The content of a regular file. Raises NotRegularError, and OSError if it is larger than `most` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read()


def read_text(path: str | Path) -> str:
    """The text of a regular UTF-8 file. Raises OSError, and UnicodeDecodeError, which is a ValueError."""
    return read_regular(path).decode("utf-8")


def no_directory_reason(path: Path, error: OSError) -> str:
    """Why a directory could not be created. For a link to nothing, and for a file, the system says only "File exists"."""
    link = next((each for each in (path, *path.parents) if each.is_symlink() and not each.exists()), None)
    if link is not None:
        return f"{link} is a link to {os.readlink(link)}, which does not exist"
    return "is a file" if path.exists() and not path.is_dir() else error.strerror or str(error)


def check_output(output: str | Path, overwrite: bool, field: str = "--output") -> Path:
    """The path of a file that can be written. Raises ConfigError, naming `field`, if it cannot, or if it exists.

    overwrite: accept an existing file; pipes and devices are always accepted.
    """
    if not str(output):
        raise ConfigError(field, "", reason="must be a file")
    check_local(output, field)
    path = Path(expand_user(output, field))
    if path.is_dir():
        raise ConfigError(field, str(path), reason="is a directory", hint="give a file in it")
    if path.is_file() and not overwrite:
        raise ConfigError(field, str(path), reason="file exists", hint="use another file, or --overwrite")
    if path.exists() and not path.is_file():
        return path
    folder = Path(os.path.realpath(path)).parent  # Path.resolve raises RuntimeError for a loop of links
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise ConfigError(field, str(path), reason=f"{str(existing)!r} is not a writable directory")
    return path


def write_atomically(path: Path, data: bytes | str | IO[bytes], *, sync: bool = False) -> None:
    """Replace a file: at every moment it holds either the old or the new content.

    data: the content, text to encode as UTF-8, or an open file, which is copied in parts. sync: also flush it to the disk.
    Raises OSError with the file's name.
    """
    with _temporary(path) as temporary:
        with open(temporary, "xb") as file:
            if isinstance(data, (bytes, str)):
                file.write(data.encode() if isinstance(data, str) else data)
            else:
                shutil.copyfileobj(data, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)


def create_atomically(path: Path, data: bytes) -> None:
    """Create a file with its content at once. Raises FileExistsError, and OSError with the file's name."""
    with _temporary(path) as temporary:
        temporary.write_bytes(data)
        os.link(temporary, path)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A new name beside a file, which is removed at the end. Errors have the name of the file."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")  # no existing file can have this name
    try:
        yield temporary
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_output(path: Path, data: bytes) -> None:
    """Write a file named by the user: a regular file atomically, a pipe or device directly. Missing folders are created.

    A symbolic link stays and its target is replaced. Raises OSError with the file's name.
    """
    if path.exists() and not path.is_file():
        try:
            path.write_bytes(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)


def discard_output(stream: IO[str], error: OSError) -> str:
    """Redirect stdout or stderr, which cannot be written, to /dev/null: what it holds and what follows is lost without errors.

    Returns a line about it.
    """
    name = getattr(stream, "name", "output")
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        if (number := stream.fileno()) in (1, 2):
            name = {1: "stdout", 2: "stderr"}[number]
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
            stream.flush()
    return f"{name} cannot be written ({error.strerror or error}); the run continues without it"


def allow_open_files(count: int) -> None:
    """Raise the limit of open files to more than `count`: ImageNet has 1,024, all held open, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 512
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))
