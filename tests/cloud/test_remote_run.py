from dataclasses import replace

import numpy as np
import pytest
from helpers.checkpoints import metadata, replicate

from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.manifest import MANIFEST, CorruptCheckpoint
from jaxdp.cloud.lease import LeaseRecord
from jaxdp.cloud.location import Location, open_location
from jaxdp.cloud.remote_run import RemoteName, RemoteRun, download_checkpoint
from jaxdp.config import Checkpoint
from jaxdp.parallel.mesh import make_mesh

LEASE = LeaseRecord(number=2, token="t", holder="process 1 on host", seconds=60, adopted=["10.1.1"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the checkpoint of 10 samples."""
    folder = tmp_path_factory.mktemp("saved")
    manager = CheckpointManager(folder, Checkpoint(), print)
    manager.save(replicate(make_mesh(1, 1), x=np.arange(3.0)), 10, metadata(10))
    manager.wait()
    return folder / "10"


@pytest.fixture
def remote(tmp_path):
    return RemoteRun(open_location(f"file://{tmp_path}/bucket/run", "--workdir"))


def put(remote, saved, name, *, without=()):
    """Upload a checkpoint under a name, which need not be the number of its samples."""
    for file in sorted(saved.rglob("*")):
        if file.is_file() and file.name not in without:
            remote.location.upload(file, f"checkpoints/{name}/{file.relative_to(saved)}")


def names(remote, lease=LEASE):
    return [str(name) for name in remote.checkpoints(lease)]


@pytest.mark.parametrize("name", ["", "x", "010", "10.1", "10.1.1.1", "10.suspect", "-1"])
def test_other_names_are_no_checkpoints(name):
    assert RemoteName.parse(name) is None


def test_complete_checkpoints_of_the_lease_and_those_it_adopted_count_and_of_the_same_samples_the_last(remote, saved):
    for name in ("10.1.1", "20.1.2", "30.2.1", "40.3.1"):  # 20.1.2 was completed after the process had lost its lease
        put(remote, saved, name)
    put(remote, saved, "50.2.2", without=(MANIFEST,))
    assert names(remote) == ["30.2.1", "10.1.1"]
    for name in ("10.2.1", "10.2.2"):
        put(remote, saved, name)
    assert names(remote) == ["30.2.1", "10.2.2"]


def test_a_rejected_checkpoint_does_not_count_and_is_kept(remote, saved):
    put(remote, saved, "10.1.1")
    remote.reject(RemoteName(10, 1, 1), "it is corrupt")
    assert names(remote) == []
    remote.remove_others([], lease=LEASE)
    assert remote.location.read("checkpoints/10.1.1/rejected") == b"it is corrupt"


def test_a_run_directory_that_was_copied_to_a_url_counts(remote, saved):
    put(remote, saved, "10")
    assert names(remote, lease=None) == ["10"]
    assert names(remote, replace(LEASE, adopted=["10"])) == ["10"]


def test_remove_others_removes_what_is_incomplete_expired_or_of_another_process(remote, saved):
    for name in ("10.1.1", "20.1.2"):
        put(remote, saved, name)
    put(remote, saved, "30.1.3", without=(MANIFEST,))
    remote.remove_others([RemoteName(10, 1, 1)], lease=LEASE)
    assert {name.split("/")[1] for name in remote.location.sizes("checkpoints")} == {"10.1.1"}


def test_the_manifest_is_removed_first(remote, saved, monkeypatch):
    put(remote, saved, "10.1.1")
    removed, remove = [], type(remote.location).remove
    monkeypatch.setattr(type(remote.location), "remove", lambda self, names: removed.extend(names) or remove(self, removed))
    remote.remove(RemoteName(10, 1, 1))
    assert removed[0].endswith(f"/{MANIFEST}")
    assert remote.location.sizes() == {}


@pytest.mark.parametrize(
    ("damage", "message"), [(b"changed", r"/state/\S+ is corrupt"), (None, r" is corrupt: \S+ is missing$")]
)
def test_a_changed_or_missing_object_is_found_and_nothing_is_left_in_place(remote, saved, tmp_path, damage, message):
    put(remote, saved, "10.1.1")
    file = next(name for name in remote.location.sizes("checkpoints") if name.endswith("manifest.ocdbt"))
    remote.location.remove([file]) if damage is None else remote.location.write(file, damage)
    with pytest.raises(CorruptCheckpoint, match=rf"^{remote.location.url}/checkpoints/10.1.1{message}"):
        remote.download_checkpoint(RemoteName(10, 1, 1), tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints/10").exists()


def test_a_byte_that_is_flipped_in_transit_does_not_make_a_checkpoint_corrupt(remote, saved, tmp_path, monkeypatch):
    put(remote, saved, "10.1.1")
    download = Location.download

    def flip(self, name, file):
        download(self, name, file)
        if name.endswith("manifest.ocdbt"):
            monkeypatch.setattr(Location, "download", download)
            file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])

    monkeypatch.setattr(Location, "download", flip)
    manifest = remote.download_checkpoint(RemoteName(10, 1, 1), tmp_path / "checkpoints")
    assert manifest.path == tmp_path / "checkpoints/10"
    assert manifest.location == f"{remote.location.url}/checkpoints/10.1.1"
    for file in (file for file in saved.rglob("*") if file.is_file()):
        assert (manifest.path / file.relative_to(saved)).read_bytes() == file.read_bytes()


def test_a_result_counts_if_its_run_has_ended(remote):
    remote.location.write("result.json", b"{}")
    remote.location.write("config.json", b"{}")
    assert set(remote.files(None)) == {"config.json", "result.json"}
    assert set(remote.files(LEASE)) == {"config.json"}
    assert set(remote.files(replace(LEASE, final={"result.json": [2]}))) == {"config.json", "result.json"}


def test_a_checkpoint_that_is_removed_during_its_download_is_chosen_anew_by_the_same_metric(remote, tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path / "saved", Checkpoint(keep=3), print)
    for samples, accuracy, loss in ((10, 0.9, 3.0), (20, 0.5, 1.0), (30, 0.6, 2.0)):
        evaluation = {"eval_accuracy": accuracy, "eval_loss": loss}
        manager.save(replicate(make_mesh(1, 1), x=np.arange(3.0)), samples, metadata(samples) | {"evaluation": evaluation})
        manager.wait()
        put(remote, tmp_path / f"saved/{samples}", samples)
    download = RemoteRun.download_checkpoint

    def download_late(self, name, folder):
        if name.samples == 20:
            self.remove(name)
        return download(self, name, folder)

    monkeypatch.setattr(RemoteRun, "download_checkpoint", download_late)
    manifest = download_checkpoint(remote.location.url, "--workdir", tmp_path / "copy", checkpoint="best", metric="eval_loss")
    assert manifest.samples == 30
