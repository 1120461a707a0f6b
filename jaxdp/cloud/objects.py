"""What object storage reports about an object without reading it: its size, and a tag that changes with its content."""

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import google_crc32c

MD5 = re.compile(r"[0-9a-f]{32}")
TIMES = ("mtime", "LastModified", "updated", "created")  # of file systems without checksums


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
