"""The mirrors of two processes that share no directory: each uploads its part of a checkpoint, as often as it takes."""

import shutil
import threading
import time
from collections import defaultdict
from queue import Queue

import pytest
from helpers.checkpoints import metadata

from jaxdp.checkpoint.listing import latest_valid
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.manifest import Manifest, file_checksum, write_manifest
from jaxdp.checkpoint.retention import Retention
from jaxdp.cloud import mirror as module
from jaxdp.cloud.lease import Lease, newest_lease
from jaxdp.cloud.location import Location, open_location
from jaxdp.cloud.mirror import Mirror, MirrorFollower
from jaxdp.cloud.remote_run import RemoteRun
from jaxdp.config import Checkpoint
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import StorageError


class Pair(ProcessGroup):
    """One of two processes, which are threads."""

    num_processes = 2

    def __init__(self, rank, queues):
        super().__init__()
        self.rank, self.queues = rank, queues

    def broadcast_object(self, name, value):
        return self.all_gather_object(name, value)[0]

    def all_gather_object(self, name, value, while_waiting=None):
        self.queues[name, self.rank].put(value)
        other = self.queues[name, 1 - self.rank].get(timeout=60)
        return [value, other] if self.rank == 0 else [other, value]


class Processes:
    """Two processes that save checkpoints by turns, each in a directory of its own."""

    def __init__(self, folder):
        self.location = open_location(f"file://{folder}/bucket/run", "--workdir")
        self.remote, self.folders = RemoteRun(self.location), [folder / "rank-0", folder / "rank-1"]
        for path in self.folders:
            path.mkdir()
        (self.folders[0] / "metrics.jsonl").write_text('{"samples": 1}\n')
        queues = defaultdict(Queue)
        self.lease = Lease.acquire(self.location, 60, adopt=lambda _: [])
        options = {"complete_here": False, "every_seconds": 0.05}
        first = Mirror(self.remote, self.folders[0], self.lease, group=Pair(0, queues), **options)
        second = MirrorFollower(self.remote, self.folders[1], group=Pair(1, queues), shares_directory=False)
        self.mirrors = [first, second]
        for mirror in self.mirrors:
            mirror.begin(Retention(2, "eval_accuracy"), lambda text: None)

    def save(self, samples):
        complete = self.folders[0] / "checkpoints" / str(samples)
        parts = [complete, self.folders[1] / "checkpoints" / f"saving-{samples}"]
        files = {}
        for rank, path in enumerate(parts):
            file = path / f"state/part-{rank}/array"
            file.parent.mkdir(parents=True)
            file.write_text(f"{rank} of {samples}")
            files[f"state/part-{rank}/array"] = file_checksum(file)
        write_manifest(Manifest(complete, samples, metadata(samples), {}, files, parts=2))
        threads = [threading.Thread(target=mirror.enqueue, args=[samples]) for mirror in self.mirrors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def uploaded(self):
        return [name.samples for name in self.remote.checkpoints(newest_lease(self.location))]


@pytest.fixture
def processes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(module, "DRAIN_SECONDS", 5.0)
    made = Processes(tmp_path)
    yield made
    made.mirrors[0].abandon()


def test_parts_are_uploaded_again_after_failures(processes, monkeypatch):
    failing, failed, write = threading.Event(), threading.Event(), Location.write

    def fail(self, name, data):
        if failing.is_set() and name.endswith("manifest.json"):
            failed.set()
            raise StorageError("connection refused", f"{self.url}/{name}")
        write(self, name, data)

    monkeypatch.setattr(Location, "write", fail)
    failing.set()
    processes.save(10)
    assert failed.wait(30)
    processes.save(20)
    processes.save(30)
    failing.clear()
    processes.mirrors[0].close(lambda: time.sleep(0.01))
    processes.mirrors[1].close(lambda: None)
    assert processes.uploaded() == [30, 20]
    newest = processes.remote.checkpoints(newest_lease(processes.location))[0]
    assert processes.location.read(newest.path("state/part-1/array")) == b"1 of 30"
    assert (processes.folders[0] / "checkpoints/30/state/part-1/array").read_text() == "1 of 30"


def test_a_process_keeps_its_parts_of_the_checkpoints_that_rank_0_keeps(processes):
    processes.save(10)
    processes.save(20)
    shutil.rmtree(processes.folders[0] / "checkpoints/10")
    processes.save(30)
    parts = {path.name for path in (processes.folders[1] / "checkpoints").iterdir()}
    assert parts == {"saving-20", "saving-30"}
    for mirror in processes.mirrors:
        mirror.close(lambda: None)


def test_rank_0_verifies_its_part_of_a_checkpoint_that_is_not_uploaded(processes, monkeypatch):
    def fail(self, file, name):
        raise StorageError("connection refused", f"{self.url}/{name}")

    monkeypatch.setattr(Location, "upload", fail)
    processes.save(10)
    processes.save(20)
    folder, mirror = processes.folders[0] / "checkpoints", processes.mirrors[0]
    assert latest_valid(folder) is None  # the part of rank 1 is not there
    manager = CheckpointManager(folder, Checkpoint(), print, group=mirror.group, uploader=mirror)
    assert manager.latest_valid().samples == 20
    (folder / "20/state/part-0/array").write_text("damaged")
    assert manager.latest_valid().samples == 10
