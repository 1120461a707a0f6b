import threading
import time

import numpy as np
import pytest
from helpers.checkpoints import metadata, replicate

from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.cloud import mirror as module
from jaxdp.cloud.lease import Lease, newest_lease
from jaxdp.cloud.location import Location, open_location
from jaxdp.cloud.mirror import Mirror
from jaxdp.cloud.remote_run import RemoteRun
from jaxdp.config import Checkpoint
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import StorageError, TrainingError
from jaxdp.parallel.mesh import make_mesh


class Run:
    """A run that saves checkpoints and mirrors them to a directory."""

    def __init__(self, folder, *, keep=2, adopted=()):
        self.workdir, self.messages = folder / "copy", []
        self.location = open_location(f"file://{folder}/bucket/run", "--workdir")
        self.remote = RemoteRun(self.location)
        self.workdir.mkdir(exist_ok=True)
        (self.workdir / "config.json").write_text("{}")
        (self.workdir / "metrics.jsonl").write_text('{"samples": 1}\n')
        self.lease = Lease.acquire(self.location, 0.5, adopt=lambda _: [str(name) for name in self.remote.checkpoints(None)])
        self.mirror = Mirror(
            self.remote,
            self.workdir,
            self.lease,
            group=ProcessGroup(),
            complete_here=True,
            every_seconds=0.05,
        )
        self.manager = CheckpointManager(
            self.workdir / "checkpoints", Checkpoint(keep=keep), self.messages.append, uploader=self.mirror
        )

    def save(self, samples, value=0.0, **more):
        state = replicate(make_mesh(1, 1), x=np.full(3, value))
        self.manager.save(state, samples, metadata(samples) | more)
        self.manager.wait()

    def begin(self):
        self.mirror.begin(self.manager.retention, self.messages.append)
        return self

    def close(self):
        self.mirror.close(lambda: None)

    def uploaded(self):
        """The samples of the checkpoints at the URL."""
        return [name.samples for name in self.remote.checkpoints(newest_lease(self.location))]


@pytest.fixture
def runs(tmp_path):
    """Makes runs, which stop at the end of the test."""
    made = []

    def make(**options):
        made.append(Run(tmp_path, **options))
        return made[-1]

    yield make
    for run in made:
        run.mirror.abandon()
        run.mirror._closing = True
        run.mirror._wake.set()


def eventually(condition):
    end = time.monotonic() + 120
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_checkpoints_and_files_are_uploaded_and_the_lease_is_released(runs):
    run = runs().begin()
    run.save(10)
    (run.workdir / "metrics.jsonl").write_text('{"samples": 1}\n{"samples": 2}\n{"torn')
    (run.workdir / "training.png").write_bytes(b"picture")
    (run.workdir / ".hidden").write_bytes(b"")
    run.save(20)
    (run.workdir / "result.json").write_text("{}")
    run.close()
    assert run.uploaded() == [20, 10]
    assert set(run.location.top_sizes()) == {"config.json", "metrics.jsonl", "training.png", "result.json"}
    last = run.remote.checkpoints(newest_lease(run.location))[0]
    assert run.location.read(last.path("metrics.jsonl")) == b'{"samples": 1}\n{"samples": 2}\n'
    lease = newest_lease(run.location)
    assert (lease.released, list(lease.final)) == (True, ["result.json"])
    assert run.messages[-1].startswith(f"uploaded 2 checkpoints to {run.location.url}, ")


def test_the_url_keeps_the_checkpoints_that_the_disk_keeps(runs):
    run = runs(keep=1).begin()
    for samples, accuracy in ((10, 0.1), (20, 0.9), (30, 0.5), (40, 0.6)):
        run.save(samples, evaluation={"eval_accuracy": accuracy})
        eventually(lambda samples=samples: samples in run.uploaded())
    run.close()
    assert run.uploaded() == [40, 20]
    assert {int(path.name) for path in (run.workdir / "checkpoints").iterdir()} == {20, 40}


def test_a_checkpoint_that_was_saved_again_replaces_the_earlier_one(runs):
    run = runs().begin()
    run.save(10)
    eventually(lambda: run.uploaded() == [10])
    run.save(10, evaluation={"eval_accuracy": 0.5})
    run.close()
    (name,) = run.remote.checkpoints(newest_lease(run.location))
    assert run.remote.read_manifest(name).accuracy == 0.5
    assert {file.split("/")[1] for file in run.location.sizes("checkpoints")} == {str(name)}


def test_what_an_earlier_session_could_not_upload_is_uploaded(runs):
    first = runs()
    first.save(10)
    first.mirror.abandon()
    second = runs().begin()
    second.close()
    assert second.uploaded() == [10]


def test_an_outage_delays_uploads_and_nothing_else(runs, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.05)
    run, failing, write = runs().begin(), threading.Event(), Location.write
    eventually(lambda: run.location.top_sizes())

    def fail(self, name, data):
        if failing.is_set():
            raise StorageError("connection refused", f"{self.url}/{name}")
        write(self, name, data)

    monkeypatch.setattr(Location, "write", fail)
    failing.set()
    run.save(10)  # if it waited for the storage, it would wait forever
    run.save(20)
    eventually(lambda: run.messages)
    assert run.uploaded() == []
    failing.clear()
    run.close()
    assert run.uploaded() == [20, 10]
    delayed, again = run.messages[:2]
    assert delayed.startswith(f"uploads to {run.location.url} are delayed (")
    assert delayed.endswith("connection refused); training continues")
    assert again.startswith(f"uploads to {run.location.url} continue after ")


def test_an_end_without_uploads_raises_and_says_where_the_rest_is(runs, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(module, "DRAIN_SECONDS", 0.5)
    run = runs().begin()
    eventually(lambda: run.location.top_sizes())

    def fail(self, name, data):
        raise StorageError("Forbidden", f"{self.url}/{name}", permanent=True)

    monkeypatch.setattr(Location, "write", fail)
    run.save(10)
    message = (
        rf"^not everything was uploaded to {run.location.url} \(.*Forbidden\); {run.workdir} holds the rest, and the same "
    )
    with pytest.raises(TrainingError, match=message):
        run.close()


def test_a_run_that_was_taken_over_ends_and_uploads_nothing_more(runs):
    first = runs().begin()
    first.save(10)
    eventually(lambda: first.uploaded() == [10])
    Lease.acquire(first.location, 60, token=first.lease.record.token, adopt=lambda _: ["10.1.1"]).abandon()
    before = first.location.sizes()
    first.save(20)
    eventually(lambda: first.lease.lost)
    with pytest.raises(TrainingError, match=rf"^{first.location.url} was taken over by process \d+ on \S+, because "):
        first.mirror.check()
    with pytest.raises(TrainingError, match="taken over"):
        first.close()
    assert first.uploaded() == [10]
    assert {name: size for name, size in first.location.sizes().items() if name in before} == before


def test_rejected_checkpoints_are_no_longer_used(runs):
    run = runs().begin()
    for samples in (10, 20):
        run.save(samples)
    eventually(lambda: run.uploaded() == [20, 10])
    run.manager.mark_audited()
    run.save(30)
    eventually(lambda: 30 in run.uploaded())
    run.manager.quarantine_unaudited()
    run.close()
    assert run.uploaded() == [20]
    rejected = [name for name in run.location.sizes("checkpoints") if name.endswith("/rejected")]
    assert [name.split("/")[1].split(".")[0] for name in rejected] == ["30"]
