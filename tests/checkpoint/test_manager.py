import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from helpers.checkpoints import diverged_array, metadata, replicate, save_now, sharded_array
from helpers.runs import Hidden, Recorder, train_shown
from jax.sharding import NamedSharding, PartitionSpec

import jaxdp
from jaxdp.checkpoint import manifest, orbax_io
from jaxdp.checkpoint.listing import checkpoint_paths, read_manifests
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.replicas import array_checksum
from jaxdp.config import Checkpoint, Config
from jaxdp.distributed import watchdog
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.distributed.signal_handler import StopTraining
from jaxdp.errors import TrainingError
from jaxdp.inference.checkpoints import choose_checkpoint, list_checkpoints
from jaxdp.loggers.console import Screen
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.state import TrainState
from jaxdp.validation import to_json

TESTS = Path(__file__).parents[1]


def test_save_with_diverged_parameters_is_rejected_naming_the_device(tmp_path):
    mesh = make_mesh(2, 4)
    state = {"a": replicate(mesh, x=np.zeros(3))["x"], "b": diverged_array(mesh, (4, 5), 6)}
    messages = []
    manager = CheckpointManager(tmp_path, Checkpoint(), messages.append)
    save_now(manager, state, 80)
    name = str(mesh.devices.flat[6])
    with pytest.raises(TrainingError, match=rf"do not hold the same parameters at samples 80: {name} differs from"):
        manager.check()
    assert checkpoint_paths(tmp_path) == []


@pytest.mark.parametrize("field", ["params", "opt_state"])
def test_save_of_a_sharded_state_compares_the_replicas_of_all_shards(tmp_path, field):
    """A state in shards also compares the optimizer's arrays, which would return to the parameters in the next step."""
    mesh, values = make_mesh(3, 2), np.arange(8, dtype=np.float32)
    state = TrainState(replicate(mesh, x=values), (), replicate(mesh, x=values), (), ())
    shards = {
        name: {"x": sharded_array(mesh, values[None], changed=mesh.devices[2, 1] if name == field else None)}
        for name in ("params", "opt_state")
    }
    manager = CheckpointManager(tmp_path, Checkpoint(), print)
    save_now(manager, state, 80, placed=state._replace(**shards))
    with pytest.raises(TrainingError, match=rf"at samples 80: {mesh.devices[2, 1]} differs from"):
        manager.check()


def test_save_with_infinite_parameters_is_rejected(tmp_path):
    mesh = make_mesh(1, 2)
    manager = CheckpointManager(tmp_path, Checkpoint(), print)
    save_now(manager, replicate(mesh, x=np.array([1.0, np.inf], np.float32)), 80)
    with pytest.raises(TrainingError, match="the parameters are not finite at samples 80; no checkpoint was saved"):
        manager.check()
    with pytest.raises(TrainingError, match="not finite at samples 80"):
        manager.save(replicate(mesh, x=np.ones(2, np.float32)), 88, metadata(88))
    assert list(tmp_path.iterdir()) == []


def test_save_keeps_the_newest_the_best_and_retained_checkpoints(tmp_path):
    mesh = make_mesh(1, 1)
    manager = CheckpointManager(tmp_path, Checkpoint(keep=2), print)
    for samples, accuracy in [(10, 0.2), (20, 0.9), (30, 0.5), (40, None), (50, 0.9), (60, 0.1), (70, None)]:
        evaluation = accuracy and {"eval_accuracy": accuracy}
        save_now(manager, replicate(mesh, x=np.full(3, float(samples))), samples, {"evaluation": evaluation})
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["70", "60", "50"]  # 50 is as accurate as 20, and newer
    assert manager.retain_latest(59).samples == 50
    assert manager.retain_latest(50).samples == 50
    assert manager.retention.retained == [50]
    save_now(manager, replicate(mesh, x=np.zeros(3)), 80, {"evaluation": {"eval_accuracy": 1.0}})
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["80", "70", "50"]


def test_only_the_parameters_of_a_whole_state_are_compared_and_must_be_finite(tmp_path):
    """Other optimizer states than on most devices make other parameters in the next step."""
    mesh = make_mesh(2, 4)
    state = TrainState(replicate(mesh, x=np.zeros(3)), (), {"x": diverged_array(mesh, (3,), 6)}, (), replicate(mesh, y=np.inf))
    manager = CheckpointManager(tmp_path, Checkpoint(), print)
    save_now(manager, state, 80)
    manager.check()
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["80"]


def test_a_save_waits_for_the_one_before_whose_copy_it_overwrites(tmp_path, monkeypatch):
    mesh, again, write, copy = make_mesh(1, 1), threading.Event(), orbax_io.write_state, orbax_io.copy_to_host

    def slow(*arguments, **options):
        again.wait(0.1)  # until a save that did not wait has overwritten the copy
        write(*arguments, **options)

    def copy_again(state, buffers=None):
        host = copy(state, buffers)
        if buffers is not None:
            again.set()
        return host

    monkeypatch.setattr(orbax_io, "write_state", slow)
    monkeypatch.setattr(orbax_io, "copy_to_host", copy_again)
    manager = CheckpointManager(tmp_path, Checkpoint(), print)
    assert not manager.is_saving
    for samples in (10, 20):
        manager.save(replicate(mesh, x=np.full(3, samples, np.float32)), samples, metadata(samples))
    manager.wait()
    assert not manager.is_saving
    for samples in (10, 20):
        (found,) = [m for m in read_manifests(tmp_path) if m.samples == samples]
        assert found.arrays["['x']"][2] == array_checksum(np.full(3, samples, np.float32))


class Uploads:
    """What a manager asks of it."""

    complete_here = True

    def __init__(self):
        self.calls = []

    def enqueue(self, samples):
        self.calls.append(samples)

    def reject(self, *, after, reason):
        self.calls.append(f"reject after {after}")


def test_complete_saves_alone_are_uploaded_with_all_bad_images_and_a_hint(tmp_path, monkeypatch):
    uploads, messages = Uploads(), []
    manager = CheckpointManager(tmp_path, Checkpoint(), messages.append, uploader=uploads)
    progress = metadata(10)["progress"] | {"bad_images": {"a.png": "truncated"}}
    manager.try_save()
    manager.check_trial()
    assert [*tmp_path.iterdir()] == []
    seen = []
    state = replicate(make_mesh(1, 1), x=np.zeros(3))
    save_now(manager, state, 10, {"progress": progress}, before_manifest=lambda: seen.append(manager.is_saving))
    fill_disk_from(monkeypatch, 20)
    save_now(manager, state, 20)
    assert (seen, uploads.calls) == ([True], [10])
    assert next(read_manifests(tmp_path)).metadata["progress"]["bad_images"] == {"a.png": "truncated"}
    assert watchdog.current().resume_hint == f"the same command continues from {tmp_path}/10"
    assert messages[0].endswith(f"; training continues, and the checkpoint {tmp_path}/10 is kept")
    assert manager.group.status.background_save == ""


@pytest.mark.parametrize(
    ("audited", "resumed", "damaged", "continues", "after"),
    [
        (20, 10, None, 20, 20),
        (None, 10, None, 10, 10),
        (None, None, None, None, -1),
        (20, None, 20, 10, 10),
        (5, None, None, None, 5),  # which may be only at the URL
    ],
)
def test_what_was_saved_after_the_last_audit_that_passed_is_quarantined(tmp_path, audited, resumed, damaged, continues, after):
    uploads, state = Uploads(), replicate(make_mesh(1, 1), x=np.zeros(3))
    manager = CheckpointManager(tmp_path, Checkpoint(keep=9), print, uploader=uploads)
    for samples in (10, 20, 30, 40):
        save_now(manager, state, samples)
    assert manager.mark_audited() == manager.retention.audited == 40
    manager.retention.audited, manager.retention.resumed = audited, resumed
    if damaged:
        (tmp_path / f"{damaged}/state/_METADATA").unlink()
    rollback = manager.quarantine_unaudited()
    newer = [samples for samples in (40, 30, 20, 10) if continues is None or samples > continues]
    assert rollback.checkpoint == (continues and tmp_path / str(continues))
    assert rollback.quarantined == [tmp_path / f"{samples}.suspect" for samples in newer]
    assert (rollback.failures, uploads.calls[4:]) == ([], [f"reject after {after}"])


def test_an_audit_that_passes_trusts_the_newest_checkpoint_and_not_the_resumed_one(tmp_path):
    manager = CheckpointManager(tmp_path, Checkpoint(), print)
    manager.retention.audited = manager.retention.resumed = 5
    assert manager.mark_audited() is None
    assert (manager.retention.audited, manager.retention.resumed) == (None, None)


class Second(ProcessGroup):
    """Rank 1 of two processes whose rank 0 has restored the checkpoint of 10 samples."""

    rank, num_processes = 1, 2

    def __init__(self):
        super().__init__()
        self.hosts = ["a", "b"]

    def broadcast_object(self, name, value):
        return 10


def test_another_rank_restores_what_rank_0_chose_or_says_that_it_cannot(saved):
    folder, abstract = saved
    (folder / "saving-30").mkdir()
    save_now(CheckpointManager(folder, Checkpoint(), print), replicate(make_mesh(1, 1), x=np.ones(3)), 20)
    (folder / "saving-30").mkdir()
    manager = CheckpointManager(folder, Checkpoint(), print, group=Second())
    state, found = manager.restore(lambda samples: abstract)
    assert (found.samples, [*np.asarray(state["x"])]) == (10, [0, 1, 2])
    (folder / "10/state/_METADATA").unlink()
    with pytest.raises(TrainingError, match=r"_METADATA cannot .* \(on rank 1, host b; rank 0 could read it\)"):
        manager.restore(lambda samples: abstract)
    manager.close()
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20", "saving-30"]  # rank 0 cleans up
    uploads = Uploads()
    uploads.complete_here = False  # of a host that holds its own part only; 10 has no part
    alone = CheckpointManager(folder, Checkpoint(), print, group=Second(), uploader=uploads)
    assert (alone.latest_valid(19).samples, manager.latest_valid(19)) == (10, None)


def test_a_save_interrupted_before_its_final_name_is_completed_and_others_are_removed(saved):
    folder, abstract = saved
    shutil.copytree(folder / "10", folder / "saving-20")  # of another checkpoint
    (folder / "saving-30").mkdir()
    (folder / "10").rename(folder / "saving-10")
    assert CheckpointManager(folder, Checkpoint(), print).restore(lambda samples: abstract)[1].samples == 10
    assert os.listdir(folder) == ["10"]
    shutil.copytree(folder / "10", folder / "saving-10")
    CheckpointManager(folder, Checkpoint(), print).close()
    assert os.listdir(folder) == ["10"]


IRREGULAR = {
    "pipe": os.mkfifo,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to a checkpoint": lambda path: path.symlink_to(path.parent / "10"),
}


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
def test_irregular_file_with_the_name_of_a_checkpoint_is_corrupt_and_replaced_by_the_next_save(saved, make):
    folder, abstract = saved
    (folder.parent / "config.json").write_text(to_json(Config()))
    for name in ("20", "30", "saving-30", "saving-30-replaced"):
        make(folder / name)
    (row, *irregular) = list_checkpoints(folder.parent)
    assert (row["samples"], row["error"]) == (10, None)
    expected = [f"{folder}/{name} is corrupt: it is not a directory; links are not followed" for name in (20, 30)]
    assert [row["error"] for row in irregular] == expected
    assert choose_checkpoint(folder.parent).samples == 10
    messages = []
    manager = CheckpointManager(folder, Checkpoint(), messages.append)
    assert manager.restore(lambda samples: abstract)[1].samples == 10
    assert messages == [
        f"skipped the checkpoint of samples {name}: {reason}; renamed to {folder}/{name}.corrupt"
        for name, reason in zip(("30", "20"), reversed(expected), strict=True)
    ]
    for name in ("30", "saving-30", "saving-30-replaced"):
        make(folder / name)
    save_now(manager, replicate(make_mesh(1, 1), x=np.ones(3)), 30)
    assert manager.last_error is None
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20.corrupt", "30", "30.corrupt"]
    assert choose_checkpoint(folder.parent).samples == 30


def test_unreadable_checkpoint_stops_the_run_and_is_kept(saved, monkeypatch, capsys):
    """The tests run as root, who may read every file, so the error is injected."""
    folder, abstract = saved
    manager = CheckpointManager(folder, Checkpoint(), print)
    save_now(manager, replicate(make_mesh(1, 1), x=np.ones(3)), 20)
    (folder.parent / "config.json").write_text(to_json(Config()))
    for name, file in (("read_regular", "20/manifest.json"), ("open_regular", "20/state/_METADATA")):
        real = getattr(manifest, name)

        def denied(path, *more, real=real, file=file):
            if str(path).endswith(file):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *more)

        with monkeypatch.context() as patch:
            patch.setattr(manifest, name, denied)
            with pytest.raises(TrainingError, match=rf"{file} cannot be read: Permission denied$"):
                CheckpointManager(folder, Checkpoint(), print).restore(lambda samples: abstract)
            errors = {row["samples"]: row["error"] for row in list_checkpoints(folder.parent)}
            assert errors[10] is None
            assert errors[20].endswith(f"{file} cannot be read: Permission denied")
            assert choose_checkpoint(folder.parent).samples == 10
            assert (
                f"using {folder}/10 instead of the result checkpoint: {folder}/{file} cannot be read" in capsys.readouterr().err
            )
    assert [path.name for path in checkpoint_paths(folder)] == ["20", "10"]


FULL = (
    'RESOURCE_EXHAUSTED: Error writing "x/0" in OCDBT database at local file "/a/b": Failed to write 9 bytes to file 13: No '
    "space left on device [os_error_code='28'] [source locations='x.cc:1']"
)


def fill_disk_from(monkeypatch, samples):
    """Make Orbax fail as on a full disk in every save of at least `samples` samples."""
    save = ocp.Checkpointer.save

    def fail(self, path, *arguments, **options):
        if int(path.parent.name.removeprefix("saving-")) >= samples:
            raise ValueError(FULL)
        return save(self, path, *arguments, **options)

    monkeypatch.setattr(ocp.Checkpointer, "save", fail)


def test_save_on_a_full_disk_reports_the_system_error_and_continues(tmp_path, monkeypatch):
    state, messages = replicate(make_mesh(1, 1), x=np.arange(3.0)), []
    manager = CheckpointManager(tmp_path, Checkpoint(), messages.append)
    with monkeypatch.context() as patch:
        fill_disk_from(patch, 0)
        save_now(manager, state, 10)
    (message,) = messages
    assert message.startswith(f"the checkpoint {tmp_path}/saving-10 could not be saved (No space left on device); training ")
    assert manager.last_error == "No space left on device"
    save_now(manager, state, 20)
    assert manager.last_error is None


def test_the_log_is_on_the_disk_before_the_manifest_that_completes_a_checkpoint(tmp_path, monkeypatch):
    """Otherwise a power failure between the two leaves a checkpoint whose log lacks its records."""
    manager, state, seen = CheckpointManager(tmp_path, Checkpoint(), print), replicate(make_mesh(1, 1), x=np.zeros(3)), []

    def sync_log():
        seen.append([path.name for path in tmp_path.rglob("*") if path.name in ("10", "manifest.json")])
        if len(seen) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    for error, completed in (("Input/output error", []), (None, [tmp_path / "10"])):
        manager.save(state, 10, metadata(10), before_manifest=sync_log)
        manager.wait()
        assert manager.last_error == error
        assert checkpoint_paths(tmp_path) == completed
    assert seen == [[], []]


def fail_fsync_of_directories(monkeypatch, tmp_path):
    """As on some CIFS and FUSE mounts: Orbax's library, which syncs directories, reports the error."""

    class Store:
        @staticmethod
        def open(*arguments, **options):
            raise ValueError("UNKNOWN: Failed to sync directory [os_error_code='22'] [source locations='x.cc:1']")

    monkeypatch.setattr(tensorstore, "KvStore", Store)


def fail_manifests(monkeypatch, tmp_path):
    real = os.fsync

    def fsync(descriptor):
        if ".tmp" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def fail_renames(monkeypatch, tmp_path):
    real = Path.rename

    def rename(self, target):
        if self.name.startswith("saving-") and self.is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(self))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


@pytest.mark.parametrize("fail", [fail_fsync_of_directories, fail_manifests, fail_renames])
def test_where_every_save_fails_nothing_is_trained(tiny, tmp_path, monkeypatch, fail):
    fail(monkeypatch, tmp_path)
    steps = []
    screen = Screen(quiet=True)
    screen.step = steps.append
    message = rf"no checkpoint can be saved in {tmp_path}/checkpoints \(Invalid argument; the file system /.*\), so nothing was"
    with pytest.raises(TrainingError, match=message):
        train_shown(tiny, tmp_path, screen=screen)
    assert steps == []
    assert [*tmp_path.glob("checkpoints/*")] == []


@pytest.mark.parametrize("seconds", [10**9, -3600])
def test_save_while_the_system_clock_jumps_succeeds(tmp_path, monkeypatch, seconds):
    """Orbax measures its timeout with the system clock."""
    clock, save, offset = time.time, ocp.Checkpointer.save, [0]
    monkeypatch.setattr(time, "time", lambda: clock() + offset[0])

    def save_and_jump(self, *arguments, **options):
        save(self, *arguments, **options)
        offset[0] = seconds

    monkeypatch.setattr(ocp.Checkpointer, "save", save_and_jump)
    manager = CheckpointManager(tmp_path, Checkpoint(), print)
    save_now(manager, replicate(make_mesh(1, 1), x=np.arange(3.0)), 10)
    assert manager.last_error is None
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["10"]


def test_train_with_failed_last_save_reports_the_newest_checkpoint(tiny, tmp_path, monkeypatch):
    fill_disk_from(monkeypatch, 160)
    screen = Recorder()
    result = train_shown(tiny, tmp_path, screen=screen)
    assert result.save_error == "No space left on device"
    newest = tmp_path / "checkpoints/112"
    assert screen.lines[-1] == f"the last checkpoint could not be saved (No space left on device); the newest is {newest}"
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(TrainingError, match=r"^no checkpoint could be saved \(No space left on device\), so the trained "):
        jaxdp.train(tiny, tmp_path)


def test_stop_with_failed_save_raises_training_error(tiny, tmp_path, monkeypatch):
    class StopAt(Hidden):
        def step(self, record):
            if record["step"] == 3:
                raise StopTraining

    fill_disk_from(monkeypatch, 0)
    with pytest.raises(TrainingError, match=r"could not be saved \(No space left on device\); there is no checkpoint yet"):
        train_shown(tiny, tmp_path, screen=StopAt())


def test_manager_waits_for_the_last_save_of_an_earlier_run_in_the_same_folder(tmp_path, monkeypatch):
    """As after a second signal, which does not wait for the save."""
    entered, proceed = threading.Event(), threading.Event()
    earlier = CheckpointManager(tmp_path, Checkpoint(), print)
    complete = earlier._complete

    def slow(*arguments, **options):
        entered.set()
        assert proceed.wait(60)
        return complete(*arguments, **options)

    monkeypatch.setattr(earlier, "_complete", slow)
    earlier.save(replicate(make_mesh(1, 2), x=np.ones(3)), 10, metadata(10))
    assert entered.wait(60)
    threading.Timer(0.5, proceed.set).start()
    later = CheckpointManager(tmp_path, Checkpoint(), print)
    assert proceed.is_set()
    assert [path.name for path in checkpoint_paths(later.folder)] == ["10"]


KILLS = 4
SAVING = """
import sys
from pathlib import Path
import numpy as np
from helpers.checkpoints import metadata, replicate, save_now
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.config import Checkpoint
from jaxdp.parallel.mesh import make_mesh

manager, mesh = CheckpointManager(Path(sys.argv[1]), Checkpoint(), print), make_mesh(1, 1)
for number in range(2, 100_000):
    samples = number // 2  # each of them twice, as after an evaluation
    save_now(manager, replicate(mesh, x=np.full(100_000, samples, np.float32)), samples)
    print(samples, flush=True)
"""


@pytest.mark.slow
def test_kill_during_saves_leaves_the_newest_complete_checkpoint(tmp_path):
    """At random moments of saves of about 50 ms; every second save replaces a checkpoint."""
    random, sharding = np.random.default_rng(0), NamedSharding(make_mesh(1, 1), PartitionSpec())
    abstract = {"x": jax.ShapeDtypeStruct((100_000,), np.float32, sharding=sharding)}
    for number in range(KILLS):
        folder = tmp_path / str(number)
        saving = subprocess.Popen([sys.executable, "-c", SAVING, folder], stdout=subprocess.PIPE, text=True, cwd=TESTS)
        saved = [saving.stdout.readline(), saving.stdout.readline()]
        time.sleep(random.uniform(0, 0.2))
        saving.kill()
        last = int([*saved, *saving.communicate()[0].split()][-1])
        restored, newest = CheckpointManager(folder, Checkpoint(), print).restore(lambda samples: abstract)
        assert newest.samples in (last, last + 1)
        np.testing.assert_array_equal(restored["x"], newest.samples)
        assert all(path.name.isdecimal() for path in folder.iterdir())
