import hashlib
import importlib
import sys
import uuid

import pytest
from helpers.object_storage import NO_AMAZON

from jaxdp.cloud.location import ObjectInfo, ObjectNotFoundError, join_url, open_location
from jaxdp.errors import ConfigError, StorageError
from jaxdp.files import is_url


@pytest.fixture(params=["file", "memory"])
def location(request, tmp_path):
    url = f"file://{tmp_path}/folder" if request.param == "file" else f"memory://{tmp_path}/folder"
    return open_location(url, "--workdir")


def test_what_was_written_is_read_and_listed(location, tmp_path):
    assert location.sizes() == location.top_sizes() == {}
    location.write("a.txt", b"one")
    (tmp_path / "local").write_bytes(b"three")
    location.upload(tmp_path / "local", "deep/er/b")
    assert location.read("a.txt") == b"one"
    assert location.sizes() == {"a.txt": 3, "deep/er/b": 5}
    assert location.sizes("deep") == {"deep/er/b": 5}
    assert location.top_sizes() == {"a.txt": 3}
    location.download("deep/er/b", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"three"
    assert open_location(f"{location.url}/deep", "--workdir").read("er/b") == b"three"
    location.remove(["a.txt", "missing"])
    assert location.sizes() == {"deep/er/b": 5}


def test_a_local_file_that_cannot_be_read_is_no_error_of_the_storage(location, tmp_path):
    with pytest.raises(OSError, match="local") as error:
        location.upload(tmp_path / "local", "b")
    assert not isinstance(error.value, StorageError)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop") as error:
        location.upload(tmp_path / "loop", "b")
    assert not isinstance(error.value, StorageError)


def test_create_writes_once(location):
    assert location.create("x", b"first")
    assert not location.create("x", b"second")
    assert location.read("x") == b"first"


def test_a_missing_object_raises_with_its_url(location):
    with pytest.raises(ObjectNotFoundError) as error:
        location.read("missing")
    assert (error.value.filename, error.value.permanent) == (join_url(location.url, "missing"), True)
    assert error.value.strerror == "not found"


def test_an_unwritable_folder_raises_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as error:
        open_location(f"file://{tmp_path}/file/x", "--workdir").write("a", b"")
    assert error.value.strerror in ("Not a directory", "File exists")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "s3:/bucket/x",
            r"^--workdir='s3:/bucket/x': a URL has two slashes after its protocol; use s3://BUCKET/PATH or a ",
        ),
        ("simplecache::s3://bucket/x", r"^--workdir='simplecache::s3://bucket/x': chained URLs \(with ::\) are not "),
        ("zip://x::file:///x.zip", r"chained URLs \(with ::\) are not supported"),
        ("nothing://x/y", r"^--workdir='nothing://x/y': Protocol not known: nothing; use s3://BUCKET/PATH, "),
    ],
)
def test_a_url_that_cannot_be_read_is_refused(url, message):
    assert is_url(url)
    with pytest.raises(ConfigError, match=message):
        open_location(url, "--workdir")


@pytest.mark.parametrize(
    ("tag", "answers", "reads"),
    [
        ("md5", [b"damaged", b"content"], 2),
        ("md5", [b"damaged", b"damages", b"content"], 3),
        ("kms", [b"content", b"content"], 2),  # the ETag of an object that is encrypted with a key of KMS
        ("etag", [b"content"], 1),
    ],
)
def test_what_was_damaged_in_transit_is_read_again(tmp_path, monkeypatch, tag, answers, reads):
    tags = {"md5": f"md5:{hashlib.md5(b'content').hexdigest()}", "kms": f"md5:{'0' * 32}", "etag": "etag:x-2"}
    location, left = open_location(f"memory://{tmp_path}", "--workdir"), list(answers)
    monkeypatch.setattr(type(location), "info", lambda self, name: ObjectInfo(7, tags[tag]))
    monkeypatch.setattr(location.fs, "cat_file", lambda path, **_: left.pop(0))
    assert location.read_intact("config.json") == b"content"
    assert len(answers) - len(left) == reads


def test_what_is_damaged_in_every_transit_is_not_returned(tmp_path, monkeypatch):
    location, left = open_location(f"memory://{tmp_path}", "--workdir"), [b"1", b"2", b"3"]
    monkeypatch.setattr(type(location), "info", lambda self, name: ObjectInfo(7, "etag:x-2"))
    monkeypatch.setattr(location.fs, "cat_file", lambda path, **_: left.pop(0))
    with pytest.raises(StorageError, match="does not have the size or the checksum of the object") as error:
        location.read_intact("config.json")
    assert not error.value.permanent


@pytest.mark.slow  # .ci/run installs the extra only for these
@pytest.mark.parametrize(
    ("url", "variables", "message"),
    [
        ("s3://bucket/x", {"AWS_ENDPOINT_URL": "garbage"}, "Invalid endpoint: garbage"),
        ("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:port"}, "Custom endpoint .* was not a valid URI"),
        ("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://[::1"}, "Invalid IPv6 URL"),
        ("s3://Bad_Bucket!/x", {}, 'Parameter validation failed: Invalid bucket name "Bad_Bucket!"'),
        ("s3://bucket/x", {"AWS_DEFAULT_REGION": "us east!"}, "Provided region_name"),
    ],
)
def test_invalid_names_are_no_outage(url, variables, message, monkeypatch):
    pytest.importorskip("s3fs", reason="needs the extra cloud")
    settings = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in (NO_AMAZON | settings | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match=message) as error:
        open_location(url, "--workdir").read("config.json")
    assert error.value.permanent


@pytest.mark.slow  # .ci/run installs the extra only for these
@pytest.mark.parametrize(
    ("kind", "permanent"),
    [("InvalidUrlClientError", True), ("NonHttpUrlClientError", True), ("InvalidUrlRedirectClientError", False)],
)
def test_an_invalid_address_of_gcs_is_no_outage(kind, permanent, tmp_path, monkeypatch):
    """A redirect is part of an answer, which may be damaged."""
    error = getattr(pytest.importorskip("aiohttp", reason="needs the extra cloud"), kind)

    def fail(path, **_):
        raise error("http://host:port/")

    location = open_location(f"memory://{tmp_path}", "--workdir")
    monkeypatch.setattr(location.fs, "cat_file", fail)
    with pytest.raises(StorageError, match="http://host:port/") as caught:
        location.read("config.json")
    assert caught.value.permanent == permanent


@pytest.mark.slow  # .ci/run installs the extra only for these
@pytest.mark.parametrize("profile", [None, "unknown"])
def test_missing_credentials_are_no_outage(profile, monkeypatch):
    pytest.importorskip("s3fs", reason="needs the extra cloud")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    settings = NO_AMAZON | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"} | ({"AWS_PROFILE": profile} if profile else {})
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match=r"Unable to locate credentials|profile .unknown. could not be found") as error:
        open_location("s3://bucket/x", "--workdir").top_sizes()
    assert error.value.permanent


def test_a_url_without_the_extra_names_it(monkeypatch):
    imported = importlib.import_module("fsspec.registry")._registry
    for url, package in (("s3://bucket/run", "s3fs"), ("gs://bucket/run", "gcsfs")):
        monkeypatch.delitem(imported, url.partition(":")[0], raising=False)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError) as error:
            open_location(f"{url}-{uuid.uuid4()}", "--workdir")
        assert str(error.value).endswith(f"': {package} is not installed; pip install -e '.[cloud]'")


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
