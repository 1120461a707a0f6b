import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.checkpoints import metadata, replicate
from helpers.processes import wait_until

from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.cloud import mirror as module
from jaxdp.cloud.lease import Lease, newest_lease
from jaxdp.cloud.location import Location, open_location
from jaxdp.cloud.mirror import Mirror, upload_part
from jaxdp.cloud.remote_run import RemoteName, RemoteRun
from jaxdp.config import Checkpoint
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import StorageError, TrainingError
from jaxdp.files import read_regular
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
def runs(tmp_path, monkeypatch):
    """Makes runs, which stop at the end of the test."""
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.05)
    made = []

    def make(**options):
        made.append(Run(tmp_path, **options))
        return made[-1]

    yield make
    for run in made:
        run.mirror.abandon()
        run.mirror._closing = True
        run.mirror._wake.set()


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
        wait_until(lambda samples=samples: samples in run.uploaded())
    run.close()
    assert run.uploaded() == [40, 20]
    assert {int(path.name) for path in (run.workdir / "checkpoints").iterdir()} == {20, 40}


def test_a_checkpoint_that_was_saved_again_replaces_the_earlier_one(runs):
    run = runs().begin()
    run.save(10)
    wait_until(lambda: run.uploaded() == [10])
    run.save(10, evaluation={"eval_accuracy": 0.5})
    run.close()
    (name,) = run.remote.checkpoints(newest_lease(run.location))
    assert run.remote.read_manifest(name).evaluation["eval_accuracy"] == 0.5
    assert {file.split("/")[1] for file in run.location.sizes("checkpoints")} == {str(name)}


def test_a_checkpoint_that_is_being_uploaded_is_kept_on_the_disk_until_it_is_at_the_url(runs, monkeypatch):
    run, began, proceed, upload = runs(keep=1), threading.Event(), threading.Event(), Location.upload

    def slow(self, file, name):
        began.set()
        proceed.wait()
        upload(self, file, name)

    monkeypatch.setattr(Location, "upload", slow)
    run.begin().save(10)
    began.wait()
    was_complete = []

    def remove(self, name):
        was_complete.append(name.path("manifest.json") in self.location.sizes())

    monkeypatch.setattr(RemoteRun, "remove", remove)
    for samples in (20, 30):
        run.save(samples)
    assert {path.name for path in (run.workdir / "checkpoints").iterdir()} == {"10", "30"}
    proceed.set()
    run.close()
    assert was_complete == [True]  # 10 was complete there, before 30 replaced it
    run.save(40)
    assert {path.name for path in (run.workdir / "checkpoints").iterdir()} == {"40"}


def test_every_outage_delays_uploads_and_nothing_else(runs, monkeypatch):
    run, failing, write = runs(keep=9).begin(), threading.Event(), Location.write
    wait_until(lambda: run.location.top_sizes())

    def fail(self, name, data):
        if failing.is_set():
            raise StorageError("connection refused", f"{self.url}/{name}")
        write(self, name, data)

    monkeypatch.setattr(Location, "write", fail)
    for outage in (0, 1):
        failing.set()
        before = run.uploaded()
        run.save(20 * outage + 10)  # if it waited for the storage, it would wait forever
        run.save(20 * outage + 20)
        wait_until(lambda outage=outage: len(run.messages) == 2 * outage + 1)
        assert run.uploaded() == before
        failing.clear()
        wait_until(lambda outage=outage: len(run.messages) == 2 * outage + 2)
    run.close()
    assert run.uploaded() == [40, 30, 20, 10]
    for delayed, again in (run.messages[:2], run.messages[2:4]):
        assert delayed.startswith(f"uploads to {run.location.url} are delayed (")
        assert delayed.endswith("connection refused); training continues")
        assert again.startswith(f"uploads to {run.location.url} continue after ")


def test_a_file_that_cannot_be_read_is_named_and_everything_else_is_uploaded(runs, monkeypatch):
    def read(path, *most):
        if Path(path).name == "damaged":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read_regular(path, *most)

    monkeypatch.setattr(module, "read_regular", read)
    run = runs()
    (run.workdir / "damaged").write_bytes(b"x")
    (run.workdir / "profile").mkdir()
    (run.workdir / "profile/loop").symlink_to("loop")
    (run.workdir / "training.png").write_bytes(b"picture")
    run.begin().save(10)
    run.close()
    assert run.uploaded() == [10]
    assert set(run.location.top_sizes()) == {"config.json", "metrics.jsonl", "training.png"}
    lines = [line for line in run.messages if "damaged" in line]
    assert len(lines) == 2  # when it is found, and at the end, however often the files were compared
    assert lines[0].startswith(f"{run.workdir}/damaged cannot be read and is not uploaded (Input/output error)")
    assert lines[1].startswith(f"not at {run.location.url}, ")
    assert "damaged (Input/output error), profile/loop (Too many levels of symbolic links)" in lines[1]


def test_a_run_without_its_log_at_the_url_is_not_complete(runs):
    run = runs()
    (run.workdir / "metrics.jsonl").unlink()
    (run.workdir / "metrics.jsonl").symlink_to("metrics.jsonl")
    run.begin()
    with pytest.raises(TrainingError, match=r"not everything was uploaded .*metrics.jsonl: Too many levels"):
        run.close()


def test_a_checkpoint_whose_local_files_fail_for_a_while_is_uploaded_later(runs, monkeypatch):
    run, failures = runs(), [OSError(errno.EIO, os.strerror(errno.EIO), "manifest.json")]

    def read(path, *most):
        if Path(path).name == "manifest.json" and failures:
            raise failures.pop()
        return read_regular(path, *most)

    monkeypatch.setattr(module, "read_regular", read)
    run.begin().save(10)
    wait_until(lambda: run.uploaded() == [10])
    assert not failures


def test_only_files_that_changed_are_read(runs, monkeypatch):
    run, read = runs(), []
    monkeypatch.setattr(module, "read_regular", lambda path, *most: read.append(path.name) or read_regular(path, *most))
    run.mirror.info = run.messages.append
    for _ in range(3):
        run.mirror._upload_files()
    assert read == ["config.json", "metrics.jsonl"]
    with open(run.workdir / "metrics.jsonl", "a") as log:
        log.write("more")
    run.mirror._upload_files()
    assert read == ["config.json", "metrics.jsonl", "metrics.jsonl"]
    assert run.location.read("metrics.jsonl") == b'{"samples": 1}\nmore'


def test_a_file_larger_than_what_is_read_at_once_is_uploaded_in_parts(runs, monkeypatch):
    run, uploads = runs(), []
    (run.workdir / "profile").mkdir()
    with open(run.workdir / "profile/trace", "wb") as file:
        file.truncate(2**30 + 1)
    monkeypatch.setattr(Location, "upload", lambda self, file, name: uploads.append((file, name)))
    run.mirror.info = run.messages.append
    run.mirror._upload_files()
    assert uploads == [(run.workdir / "profile/trace", "profile/trace")]
    assert run.messages == []


def test_the_end_of_uploads_is_told_at_once(runs, monkeypatch):
    def fail(self):
        raise RuntimeError("unexpected")

    monkeypatch.setattr(Mirror, "_compare", fail)
    run = runs().begin()
    wait_until(lambda: run.messages)
    assert run.messages[0].startswith(f"uploads to {run.location.url} have ended (unexpected)")
    with pytest.raises(TrainingError, match=r"not everything was uploaded .*\(unexpected\)"):
        run.close()


def test_a_part_that_fails_for_any_reason_answers(runs, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("unexpected")

    monkeypatch.setattr(module, "state_files", fail)
    assert upload_part(runs().remote, RemoteName(10, 1, 1), tmp_path, group=ProcessGroup()) == "unexpected"


def test_a_run_that_was_taken_over_ends_and_uploads_nothing_more(runs):
    first = runs().begin()
    first.save(10)
    wait_until(lambda: first.uploaded() == [10])
    Lease.acquire(first.location, 60, token=first.lease.record.token, adopt=lambda _: ["10.1.1"]).abandon()
    before = first.location.sizes()
    first.save(20)
    wait_until(lambda: first.lease.lost)
    with pytest.raises(TrainingError, match=rf"^{first.location.url} was taken over by process \d+ on \S+, because "):
        first.mirror.check()
    with pytest.raises(TrainingError, match="taken over"):
        first.close()
    assert first.uploaded() == [10]
    assert {name: size for name, size in first.location.sizes().items() if name in before} == before


def test_a_run_that_was_suspended_during_a_takeover_sends_no_part_of_its_next_checkpoint(runs):
    first = runs().begin()
    first.save(10)
    wait_until(lambda: first.uploaded() == [10])
    first.lease.abandon()  # renews nothing, as a suspended process
    Lease.acquire(first.location, 60, token=first.lease.record.token, adopt=lambda _: ["10.1.1"]).abandon()
    first.lease._confirmed -= 60
    before = first.location.sizes()
    first.save(20)
    wait_until(lambda: first.lease.lost)
    with pytest.raises(TrainingError, match="taken over"):
        first.close()
    assert first.location.sizes() == before


def test_rejected_checkpoints_are_no_longer_used(runs):
    run = runs().begin()
    for samples in (10, 20):
        run.save(samples)
    wait_until(lambda: run.uploaded() == [20, 10])
    run.manager.mark_audited()
    run.save(30)
    wait_until(lambda: 30 in run.uploaded())
    run.manager.quarantine_unaudited()
    run.close()
    assert run.uploaded() == [20]
    rejected = [name for name in run.location.sizes("checkpoints") if name.endswith("/rejected")]
    assert [name.split("/")[1].split(".")[0] for name in rejected] == ["30"]
