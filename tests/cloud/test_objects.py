"""Tags and checksums of objects, as servers state them."""

import hashlib

import pytest

from jaxdp.cloud.objects import ObjectInfo

DATA = b"The quick brown fox jumps over the lazy dog"


def test_tags_of_servers():
    digest = hashlib.md5(DATA).hexdigest()
    assert ObjectInfo.from_fsspec({"size": 43, "ETag": f'"{digest}"'}) == (43, f"md5:{digest}")
    assert ObjectInfo.from_fsspec({"size": 43, "ETag": '"abc-12"'}) == (43, "etag:abc-12")
    assert ObjectInfo.from_fsspec({"size": 43, "etag": "CAE=", "crc32c": "ImIEBA=="}) == (43, "crc32c:ImIEBA==")
    assert ObjectInfo.from_fsspec({"size": 43, "mtime": 5.5}) == (43, "time:5.5")


@pytest.mark.parametrize("tag", ["crc32c:ImIEBA==", "md5:9e107d9d372bb6826bd81d3542a419d6"])  # published check values
def test_content_is_checked_against_the_tag(tag):
    info = ObjectInfo(len(DATA), tag)
    assert info.matches(DATA)
    assert not info.matches(DATA[:-1] + b"G")
    assert not info.matches(DATA[:-1])


def test_content_without_a_checksum_is_checked_by_its_size():
    assert ObjectInfo(len(DATA), "etag:abc-12").matches(DATA)
    assert not ObjectInfo(len(DATA), "etag:abc-12").matches(DATA[:-1])
