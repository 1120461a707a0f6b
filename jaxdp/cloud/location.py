"""A folder at a URL: reading, writing, listing and removing objects through fsspec (extra `cloud`)."""

import base64
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import google_crc32c

from jaxdp.cloud.fast_reader import FastReader, new_gcs_store, new_s3_store
from jaxdp.errors import ConfigError, StorageError, first_line
from jaxdp.files import check_no_password, create_atomically, open_regular, write_atomically

CONNECT_SECONDS, READ_SECONDS = 5.0, 30.0  # time-outs of one request
CONNECTIONS = 256  # requests at a time: 5,000 per second if each takes 50 ms


def _s3_options() -> dict[str, Any]:
    # s3fs repeats failed requests itself
    timeouts = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
    return {"config_kwargs": timeouts | {"retries": {"max_attempts": 1}, "max_pool_connections": CONNECTIONS}}


def _gcs_options() -> dict[str, Any]:
    import aiohttp

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback for every request that it gives up
    return {"requests_timeout": aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)}


class Protocol(NamedTuple):
    """package: the package in the extra. options: for its file system. reading: options of its `cat_file`, so that one request
    reads an object. new_store: see FastReader.
    """

    package: str
    options: Callable[[], dict[str, Any]]
    reading: dict[str, Any]
    new_store: Callable[..., Any] | None


_S3 = Protocol("s3fs", _s3_options, {"max_concurrency": 1}, new_s3_store)  # with more, s3fs asks for the size first
_GCS = Protocol("gcsfs", _gcs_options, {}, new_gcs_store)
_OTHER = Protocol("", dict, {}, None)
PROTOCOLS = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS}
LOCAL = "file"  # fsspec's protocol of directories
PERMANENT = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
READS = 3  # of an object whose content does not match its tag
REFUSED = {  # by botocore and aiohttp, before a request is sent
    *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError", "InvalidRegionError"),
    *("EndpointResolutionError", "UnknownEndpointError", "InvalidURL", "InvalidUrlClientError", "NonHttpUrlClientError"),
}
REFUSALS = ("Forbidden", "Invalid endpoint: ", "Invalid IPv6 URL")  # of gcsfs, botocore and urllib, known by their text alone
MD5 = re.compile(r"[0-9a-f]{32}")
TIMES = ("mtime", "LastModified", "updated", "created")  # of file systems without checksums
_file_systems: dict[tuple, Any] = {}
_fast_readers: dict[tuple[int, str], FastReader] = {}
_opening = threading.Lock()  # held while one is added
Result = TypeVar("Result")


class ObjectInfo(NamedTuple):
    """size: in bytes. tag: KIND:VALUE; the kinds crc32c and md5 are checksums of the content."""

    size: int
    tag: str

    @classmethod
    def from_fsspec(cls, info: Mapping[str, Any]) -> "ObjectInfo":
        """From an entry of fsspec's listings. S3's ETag is the MD5 digest of an object that was uploaded in one part."""
        etag = str(info.get("ETag") or info.get("etag") or "").strip('"')
        if checksum := info.get("crc32c"):
            tag = f"crc32c:{checksum}"
        elif MD5.fullmatch(etag):
            tag = f"md5:{etag}"
        elif etag:
            tag = f"etag:{etag}"
        else:
            tag = f"time:{next((info[key] for key in TIMES if info.get(key) is not None), '')}"
        return cls(int(info["size"] or 0), tag)

    def checksum(self) -> "Checksum | None":
        """An empty checksum of the tag's kind; None if the tag is not a checksum."""
        kind = self.tag.partition(":")[0]
        return Checksum(kind) if kind in ("crc32c", "md5") else None

    def matches(self, data: bytes) -> bool:
        """Whether content has this size and, where the tag is a checksum, this checksum."""
        checksum = self.checksum()
        if checksum:
            checksum.update(data)
        return len(data) == self.size and (checksum is None or checksum.tag == self.tag)


class Checksum:
    """The tag of content that arrives in pieces, as servers write it. kind: crc32c or md5."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.digest: Any = google_crc32c.Checksum() if kind == "crc32c" else hashlib.md5(usedforsecurity=False)

    def update(self, data: bytes) -> None:
        """Add the next piece."""
        self.digest.update(data)

    @property
    def tag(self) -> str:
        digest = self.digest.digest()
        return f"{self.kind}:{base64.b64encode(digest).decode() if self.kind == 'crc32c' else digest.hex()}"


class ObjectNotFoundError(StorageError):
    """An object that is read, or the bucket that is written to, does not exist."""

    def __init__(self, url: str, reason: str = "not found") -> None:
        super().__init__(reason, url, permanent=True)


@contextmanager
def storage_errors(url: str, field: str) -> Iterator[None]:
    """Raise a permanent StorageError, or an error of the local disk, as a ConfigError that names `field`.

    Other StorageErrors pass: the same command may succeed later. url: what the user gave.
    """
    try:
        yield
    except StorageError as error:
        if not error.permanent:
            raise
        reason = f"{error.strerror}" if error.filename == url else f"{error}"
        raise ConfigError(field, url, reason=reason, hint="check the URL, the credentials and their permissions") from None
    except OSError as error:
        reason = f"cannot write the local copy {error.filename}: {error.strerror}"
        hint = "free space there, or set --storage.directory or XDG_CACHE_HOME"
        raise ConfigError(field, url, reason=reason, hint=hint) from None


def join_url(url: str, *names: str) -> str:
    return "/".join([url.rstrip("/"), *names])


def open_location(url: str, field: str, *, notice: Callable[[str], Any] | None = None) -> "Location":
    """The folder at `url`; nothing is requested from it.

    notice: pass it if there will be many reads. obstore then does them where it can; notice receives a line if it cannot.
    Raises ConfigError, naming `field`, for an unknown protocol, and if no installed package reads such URLs.
    """
    import fsspec

    url = url.strip().rstrip("/")
    check_no_password(url, field)
    if "://" not in url:
        raise ConfigError(
            field, url, reason="a URL has two slashes after its protocol", hint="use s3://BUCKET/PATH or a local path"
        )
    if "::" in url:  # fsspec takes it for a chain anywhere in the URL
        hint = "use s3://BUCKET/PATH, gs://BUCKET/PATH, or another URL that fsspec reads"
        raise ConfigError(field, url, reason="chained URLs (with ::) are not supported", hint=hint)
    protocol = url.partition(":")[0]
    known = PROTOCOLS.get(protocol, _OTHER)
    try:
        fs, path = _file_system(url, known.options), fsspec.core.strip_protocol(url)
    except ImportError as error:
        reason = f"{known.package} is not installed" if known.package else first_line(error)
        hint = "pip install -e '.[cloud]'" if known.package else "install the package of fsspec that reads such URLs"
        raise ConfigError(field, url, reason=reason, hint=hint) from None
    except ValueError as error:
        hint = "use s3://BUCKET/PATH, gs://BUCKET/PATH, or another URL that fsspec reads"
        raise ConfigError(field, url, reason=first_line(error), hint=hint) from None
    except Exception as error:  # by package, such as missing credentials
        raise ConfigError(field, url, reason=_reason(error)) from None
    path = path.rstrip("/")
    reader = _fast_reader(known, fs, path.partition("/")[0], notice=notice) if notice and known.new_store else None
    return Location(fs, path, url, known.reading, reader)


def _file_system(url: str, options: Callable[[], dict[str, Any]]) -> Any:
    """The file system of a URL: one for each host or bucket, and for the credentials that the environment now gives.

    It is kept until the process exits. If it were collected while a different event loop runs, such as Orbax's, s3fs would
    close its connections in that loop. That fails with a traceback.
    """
    import fsspec

    key = (os.getpid(), frozenset(os.environ.items()), *url.split("/", 3)[:3])
    with _opening:
        if key not in _file_systems:
            _file_systems[key], _ = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options())
        return _file_systems[key]


def _fast_reader(protocol: Protocol, fs: Any, bucket: str, *, notice: Callable[[str], Any]) -> FastReader:
    """The reader of a bucket. All locations in the bucket share it and its connections."""
    with _opening:
        key = (id(fs), bucket)  # file systems are kept
        if key not in _fast_readers:
            timeouts = (CONNECT_SECONDS, READ_SECONDS)
            assert protocol.new_store
            _fast_readers[key] = FastReader(protocol.new_store, fs, bucket, timeouts=timeouts, notice=notice)
        return _fast_readers[key]


@dataclass(frozen=True)
class Location:
    """A folder at a URL. Names of objects are relative to it.

    fs: fsspec's file system; path: of the folder there; url: as the user gave it; reading: see Protocol. reader: tried first
    for objects that the caller verifies, and for ranges. patience: repeats requests, see `open_patiently`. Every method raises
    StorageError if a request fails, and ObjectNotFoundError if an object that it reads does not exist.
    """

    fs: Any
    path: str
    url: str
    reading: dict[str, Any] = field(default_factory=dict)
    reader: FastReader | None = None
    patience: Callable[[Callable[[], Any]], Any] | None = None

    def __str__(self) -> str:
        return self.url

    def read(self, name: str, *, verified: bool = False) -> bytes:
        """The content of an object. verified: the caller verifies it, so obstore, which does not verify, may read it."""
        return self._content(name, self.reader if verified else None, **self.reading)

    def read_intact(self, name: str) -> bytes:
        """The content of an object, read again if it does not match the object's tag."""
        earlier = None
        for _ in range(READS):
            data = self.read(name)
            # If S3 encrypts an object with a KMS key, its ETag looks like an MD5 digest but is not one.
            if data == earlier or self.info(name).matches(data):
                return data
            earlier = data
        raise StorageError("the content does not have the size or the checksum of the object", join_url(self.url, name))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """The bytes from `start` to before `end` of an object."""
        data = self._content(name, self.reader, start=start, end=end)
        if len(data) != end - start:
            raise StorageError(f"incomplete answer: {len(data)} of {end - start} bytes", join_url(self.url, name))
        return data

    def _content(self, name: str, reader: FastReader | None, **options: Any) -> bytes:
        path, start, end = f"{self.path}/{name}", options.get("start"), options.get("end")
        data = reader.read(path.partition("/")[2], start, end) if reader else None
        if data is None:
            data = self._request(name, lambda: self.fs.cat_file(path, **options))
            if reader:
                reader.count_fallback(start)
        return data

    def write(self, name: str, data: bytes) -> None:
        def write() -> None:
            if self._is_local:
                write_atomically(self._local_path(name), data)
            else:
                self.fs.pipe_file(f"{self.path}/{name}", data)

        self._request(name, write, writes=True)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless it exists, in one atomic request; returns whether it was written."""

        def create() -> bool:
            try:
                if self._is_local:
                    create_atomically(self._local_path(name), data)
                else:
                    self.fs.pipe_file(f"{self.path}/{name}", data, mode="create")
            except FileExistsError:
                return False
            return True

        return self._request(name, create, writes=True)

    def upload(self, file: Path, name: str) -> None:
        """Write an object with the content of a local file of any size, in parts.

        An interrupted upload leaves no object, or the previous one. Raises OSError if the file cannot be opened.
        """

        def upload() -> None:
            if self._is_local:
                source.seek(0)
                write_atomically(self._local_path(name), source)
            else:
                self.fs.put_file(str(file), f"{self.path}/{name}")

        with open_regular(file) as source:
            self._request(name, upload, writes=True)

    def download(self, name: str, file: Path) -> None:
        """Write an object to a local file; a download that failed leaves a file that is incomplete."""
        self._request(name, lambda: self.fs.get_file(f"{self.path}/{name}", str(file)))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Name -> bytes of all objects at any depth below `folder`; empty if there are none."""
        root = f"{self.path}/{folder}" if folder else self.path
        try:
            found = self._request(folder, lambda: self.fs.find(root, detail=True))
        except ObjectNotFoundError:
            return {}
        prefix = len(self.path) + 1
        return {path[prefix:]: int(info["size"]) for path, info in found.items() if len(path) > prefix}

    def top_sizes(self) -> dict[str, int]:
        """Name -> bytes of the objects in this folder, without those in folders below."""
        with suppress(ObjectNotFoundError):
            return {name: info.size for name, info in self.list_folder()[1].items()}
        return {}

    def info(self, name: str) -> ObjectInfo:
        """Size and tag of an object."""
        return self._request(name, lambda: ObjectInfo.from_fsspec(self.fs.info(f"{self.path}/{name}")))

    def list_folder(self, name: str = "") -> tuple[list[str], dict[str, ObjectInfo]]:
        """(names of the folders, name -> information of the objects) directly in a folder, as names relative to that folder.

        Raises ObjectNotFoundError for a folder without objects: object storage has no empty folders.
        """
        root = f"{self.path}/{name}" if name else self.path
        listed = self._request(name, lambda: self.fs.ls(root, detail=True))
        entries = [(entry["name"].rstrip("/")[len(root) + 1 :], entry) for entry in listed]
        folders = sorted(child for child, entry in entries if child and entry["type"] == "directory")
        objects = {child: ObjectInfo.from_fsspec(entry) for child, entry in entries if child and entry["type"] != "directory"}
        return folders, objects

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that do not exist are skipped."""
        for name in names:
            with suppress(ObjectNotFoundError):
                self._request(name, partial(self.fs.rm_file, f"{self.path}/{name}"))

    @property
    def _is_local(self) -> bool:
        """Whether this is a directory (file://), where fsspec would write in place."""
        protocols = (self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol
        return LOCAL in protocols

    def _local_path(self, name: str) -> Path:
        """The path of a file in a directory, whose parent is created."""
        path = Path(self.path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _request(self, name: str, request: Callable[[], Result], *, writes: bool = False) -> Result:
        """The result of a request for an object or folder, repeated while it fails if this location has patience."""
        url = join_url(self.url, name) if name else self.url

        def attempt() -> Result:
            try:
                return request()
            except FileNotFoundError:
                missing = (self.url, "the bucket does not exist") if writes else (url,)
                raise ObjectNotFoundError(*missing) from None
            except Exception as error:  # its type depends on the package
                raise StorageError(_reason(error), url, permanent=_is_permanent(error)) from None

        return self.patience(attempt) if self.patience else attempt()


def _is_permanent(error: Exception) -> bool:
    """Whether repeating a request cannot help, judged by the error's type, HTTP code, or text.

    Any other ValueError may come from an answer that was damaged in transit.
    """
    refused = str(getattr(error, "code", "")) in ("400", "401", "403", "404") or type(error).__name__ in REFUSED
    return isinstance(error, PERMANENT) or refused or str(error).startswith(REFUSALS)


def _reason(error: Exception) -> str:
    """One line on why a request failed."""
    line = (isinstance(error, OSError) and error.strerror) or first_line(error)
    return " ".join(str(error).splitlines()[:2]) if line.endswith(":") else line  # botocore's parameter validation
