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


@pytest.mark.parametrize("tag", ["crc32c:ImIEBA==", "md5:9e107d9d372bb6826bd81d3542a419d6", "etag:abc-12"])  # published values
def test_content_is_checked_against_the_tag_and_the_size(tag):
    info = ObjectInfo(len(DATA), tag)
    assert info.matches(DATA)
    assert info.matches(DATA[:-1] + b"G") == tag.startswith("etag")
    assert not info.matches(DATA[:-1])
