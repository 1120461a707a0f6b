"""Reads objects of S3 and GCS with obstore: many at a time, on all cores, with less processor time than s3fs and gcsfs."""

import os
import re
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from jaxdp.errors import first_line

VALID = timedelta(minutes=10)  # how long obstore keeps credentials; it asks for new ones when half of it is left, by the clock
ATTEMPTS, RARELY = 4, 100  # after so many failures in a row, only one of RARELY reads is tried
AMAZON = re.compile(r"https://s3(\.[a-z0-9-]+)?\.amazonaws\.com")
S3_OPTIONS = {"anon", "key", "secret", "token", "profile", "endpoint_url", "region_name", "config_kwargs", "requester_pays"}
GCS_OPTIONS = {"token", "project", "access", "endpoint_url", "requests_timeout"}
READ_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_process = os.getpid()  # obstore's threads do not exist in a process that is forked from this one


class FastReader:
    """Objects of a bucket, with the address and the credentials that s3fs or gcsfs would find.

    A failed read returns None; the file system then reads the object, or explains the failure. `count_fallback` counts reads
    where only the file system succeeded: after several in a row, this reader tries few reads.

    new_store(fs, bucket, **options): obstore's store. timeouts: seconds to connect, and between two pieces of an answer.
    notice: receives one line if the file system had to do RARELY reads in a row.
    """

    def __init__(
        self,
        new_store: Callable[..., Any],
        fs: Any,
        bucket: str,
        *,
        timeouts: tuple[float, float],
        notice: Callable[[str], Any] = lambda line: None,
    ) -> None:
        self.new_store, self.fs, self.bucket, self.notice = new_store, fs, bucket, notice
        self.connect_timeout, self.read_timeout = (timedelta(seconds=seconds) for seconds in timeouts)
        self.fallbacks = {"objects": 0, "ranges": 0}  # in a row
        self._reason = ""  # of the last failure
        self._noticed = False
        self._store: Any = None
        self._opening = threading.Lock()

    def read(self, key: str, start: int | None = None, end: int | None = None) -> bytes | None:
        """An object's content, or its bytes from `start` to before `end`; None if they could not be read.

        A main thread that calls it cannot be interrupted by a signal meanwhile.
        """
        fallbacks = self.fallbacks[_kind(start)]
        if (fallbacks >= ATTEMPTS and fallbacks % RARELY) or os.getpid() != _process:
            return None
        if key.startswith("/") or key.endswith("/"):  # obstore would read a different object
            return None
        try:
            import obstore

            store = self._open()
            if start is None:
                data = obstore.get(store, key).bytes().to_bytes()
            else:
                data = obstore.get_range(store, key, start=start, end=end).to_bytes()
        except Exception as error:  # ImportError, obstore's errors, and errors of a file system that connects
            self._reason = first_line(error)
            return None
        self.fallbacks[_kind(start)] = 0
        return data

    def count_fallback(self, start: int | None = None) -> None:
        """Note that the file system has read what this reader could not."""
        kind = _kind(start)
        self.fallbacks[kind] += 1
        if self.fallbacks[kind] >= RARELY and not self._noticed:
            self._noticed = True
            reason, reader = self._reason or "names that it does not accept", type(self.fs).__name__
            self.notice(f"obstore cannot read {kind} of {self.bucket} ({reason}); {reader} reads them, more slowly")

    def _open(self) -> Any:
        with self._opening:
            if self._store is None:
                client = {
                    "connect_timeout": self.connect_timeout,
                    "read_timeout": self.read_timeout,
                    "timeout": timedelta(days=1),  # of a whole answer, which may be slow
                    "allow_http": True,  # for an address with http
                }
                self._store = self.new_store(self.fs, self.bucket, client_options=client, retry_config={"max_retries": 0})
            return self._store


def _kind(start: int | None) -> str:
    return "objects" if start is None else "ranges"


def _options(fs: Any, followed: set[str]) -> dict[str, Any]:
    """The options that the user gave to a file system. Raises ValueError for those that obstore would not follow."""
    given = {name: value for name, value in fs.storage_options.items() if value}
    given = given.pop("client_kwargs", {}) | given
    if others := given.keys() - followed:
        raise ValueError(f"options of {type(fs).__name__}: {', '.join(sorted(others))}")
    return given


def new_s3_store(fs: Any, bucket: str, **options: Any) -> Any:
    """obstore's store for a bucket that s3fs's file system reads. Raises ValueError if obstore would not follow its options."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session
    from obstore.store import S3Store

    given = _options(fs, S3_OPTIONS)
    is_anonymous = "anon" in given
    session = Session(profile=given.get("profile"))
    if "key" in given:
        session.set_credentials(given["key"], given.get("secret"), given.get("token"))

    def credentials() -> Any:
        key, secret, token, *_ = session.get_credentials().get_frozen_credentials()  # renews them
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": datetime.now(UTC) + VALID}

    config = Config(**given.get("config_kwargs", {}), signature_version=UNSIGNED if is_anonymous else None)
    named = {name: given.get(name) for name in ("endpoint_url", "region_name")}
    endpoint, region = s3_address(session, bucket, config=config, **named)
    fixed: dict[str, Any] = {  # options that environment variables would set otherwise, under the names with precedence
        "aws_endpoint_url_s3": endpoint,
        "region": region,
        "skip_signature": is_anonymous,
        "s3_express": False,
        "virtual_hosted_style_request": False,
        "request_payer": "requester_pays" in given,
    }
    return S3Store(bucket, credential_provider=None if is_anonymous else credentials, **fixed, **options)


def s3_address(session: Any, bucket: str, **options: Any) -> tuple[str, str]:
    """(URL, region) of a bucket's server: at Amazon, the server in the bucket's region, where botocore would be redirected."""
    with closing(session.create_client("s3", **options)) as client:
        endpoint, region = client.meta.endpoint_url, client.meta.region_name
        if AMAZON.fullmatch(endpoint):
            with suppress(Exception):  # not permitted, for example
                region = client.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]["x-amz-bucket-region"]
                endpoint = f"https://s3.{region}.amazonaws.com"
    return endpoint, region or "us-east-1"


def new_gcs_store(fs: Any, bucket: str, **options: Any) -> Any:
    """obstore's store for a bucket that gcsfs's file system reads. Raises ValueError as `new_s3_store` does."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError
    from google.auth.transport.requests import Request
    from obstore.store import GCSStore

    method = _options(fs, GCS_OPTIONS).get("token", "google_default")
    if method not in ("google_default", "anon"):
        raise ValueError("a token")
    found: Any = None
    request = Request()
    if method != "anon":
        with suppress(DefaultCredentialsError):  # gcsfs, too, reads anonymously then
            found, _ = google.auth.default(scopes=[READ_SCOPE])

    def credentials() -> Any:
        found.refresh(request)
        return {"token": found.token, "expires_at": datetime.now(UTC) + VALID}

    fixed: dict[str, Any] = {"base_url": fs.base.removesuffix("/storage/v1/"), "skip_signature": found is None}
    return GCSStore(bucket, credential_provider=credentials if found else None, **fixed, **options)
