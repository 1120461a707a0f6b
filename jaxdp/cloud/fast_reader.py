"""Reads objects of S3 and GCS with obstore: many at a time, on all cores, with less processor time than s3fs and gcsfs."""

import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from jaxdp.errors import first_line

VALID = timedelta(minutes=10)  # how long obstore keeps credentials; it asks for new ones when half of it is left, by the clock
ATTEMPTS, RARELY = 4, 100  # after so many failures in a row, only one of RARELY reads is tried
AMAZON = re.compile(r"https://s3(\.[a-z0-9-]+)?\.amazonaws\.com")
_process = os.getpid()  # obstore's threads do not exist in a process that is forked from this one


class FastReader:
    """Objects of a bucket, with the address and the credentials of the file system of s3fs or gcsfs.

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


def new_s3_store(fs: Any, bucket: str, **options: Any) -> Any:
    """obstore's store for a bucket that s3fs's file system reads.

    Raises ValueError for options of the file system that obstore would not follow.
    """
    from fsspec.asyn import sync
    from obstore.store import S3Store

    def credentials() -> Any:
        expires_at = datetime.now(UTC) + VALID
        if fs.key and fs.secret:
            key, secret, token = fs.key, fs.secret, fs.token
        else:
            key, secret, token = sync(fs.loop, _aws_credentials, fs.session)
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires_at}

    others = {*fs.client_kwargs} - {"endpoint_url", "region_name"} | {*fs.config_kwargs} & {"proxies", "client_cert"}
    others |= {*fs.s3_additional_kwargs}
    if others:
        raise ValueError(f"options of s3fs: {', '.join(sorted(others))}")
    if ":" in bucket:
        raise ValueError("an access point")
    endpoint, region = s3_address(fs, bucket)
    given: dict[str, Any] = {  # options that environment variables would set otherwise, under the names with precedence
        "aws_endpoint_url_s3": endpoint,
        "region": region,
        "skip_signature": bool(fs.anon),
        "s3_express": False,
        "virtual_hosted_style_request": False,
        "request_payer": bool(fs.requester_pays),
    }
    return S3Store(bucket, credential_provider=None if fs.anon else credentials, **given, **options)


def s3_address(fs: Any, bucket: str) -> tuple[str, str]:
    """(URL, region) of a bucket's server: at Amazon, the server in the bucket's region, where botocore would be redirected."""
    address = fs.s3.meta  # connects
    if AMAZON.fullmatch(address.endpoint_url):
        with suppress(Exception):  # not permitted, for example
            headers = fs.call_s3("head_bucket", Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
            region = headers["x-amz-bucket-region"]
            return f"https://s3.{region}.amazonaws.com", region
    return address.endpoint_url, address.region_name or "us-east-1"


async def _aws_credentials(session: Any) -> tuple[str, str, str | None]:
    """(key, secret, token) of an aiobotocore session, which renews credentials that expire."""
    frozen = await (await session.get_credentials()).get_frozen_credentials()
    return frozen.access_key, frozen.secret_key, frozen.token


def new_gcs_store(fs: Any, bucket: str, **options: Any) -> Any:
    """obstore's store for a bucket that gcsfs's file system reads. Raises ValueError if the requester pays."""
    from obstore.store import GCSStore

    def credentials() -> Any:
        headers: dict[str, str] = {}
        fs.credentials.apply(headers)  # renews them
        token = next(value for name, value in headers.items() if name.lower() == "authorization").removeprefix("Bearer ")
        return {"token": token, "expires_at": datetime.now(UTC) + VALID}

    if fs.requester_pays:
        raise ValueError("a project that pays for requests")
    is_anonymous = fs.credentials.credentials is None
    given: dict[str, Any] = {"base_url": fs.base.removesuffix("/storage/v1/"), "skip_signature": is_anonymous}
    return GCSStore(bucket, credential_provider=None if is_anonymous else credentials, **given, **options)
