"""Damaged checkpoints: the defect is named and the previous one restored, without wrong weights, a hang or a traceback."""

import os
import shutil
import signal

import jax
import numpy as np
import pytest
from helpers.checkpoints import metadata, replicate

from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.manifest import MANIFEST, read_manifest, verify_files
from jaxdp.config import Checkpoint
from jaxdp.parallel.mesh import make_mesh

OLDER, NEWER = 10, 20  # the checkpoints, by samples; files of the newer one are damaged
RANDOM_DAMAGES, LIMIT_SECONDS = 60, 60


def state(samples):
    random = np.random.default_rng(samples)
    arrays = {"kernel": random.normal(size=(300, 64)), "bias": np.full(64, samples), "scale": random.normal()}
    return replicate(make_mesh(1, 2), **{name: np.asarray(value, np.float32) for name, value in arrays.items()})


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with both checkpoints."""
    folder = tmp_path_factory.mktemp("original") / "checkpoints"
    manager = CheckpointManager(folder, Checkpoint(), print)
    for samples in (OLDER, NEWER):
        manager.save(state(samples), samples, metadata(samples))
    manager.wait()
    return folder


def files_of(folder, samples):
    return sorted(path for path in (folder / str(samples)).rglob("*") if path.is_file())


# Each damages a file of the newer checkpoint in `folder`, by random numbers where it needs any.


def flip_one_bit(file, folder, random):
    content = bytearray(file.read_bytes())
    content[random.integers(len(content))] ^= 1 << random.integers(8)
    file.write_bytes(content)


def truncate(file, folder, random):
    os.truncate(file, random.integers(file.stat().st_size))


def empty(file, folder, random):
    os.truncate(file, 0)


def lengthen(file, folder, random):
    os.truncate(file, 10**12)  # sparse; reading it would take minutes


def swap(file, folder, random):
    other = random.choice([other for other in files_of(folder, NEWER) if other != file])
    file.rename(folder / "aside")
    other.rename(file)
    (folder / "aside").rename(other)


def copy_older(file, folder, random):
    newer, older = files_of(folder, NEWER), files_of(folder, OLDER)
    shutil.copyfile(older[newer.index(file) % len(older)], file)


def delete(file, folder, random):
    file.unlink()


def replace_by_pipe(file, folder, random):
    file.unlink()
    os.mkfifo(file)


def replace_by_directory(file, folder, random):
    file.unlink()
    file.mkdir()


def replace_by_link(file, folder, random):
    file.rename(folder / "aside")
    file.symlink_to(folder / "aside")


def replace_by_device(file, folder, random):
    file.unlink()
    file.symlink_to("/dev/zero")


DAMAGES = [
    flip_one_bit,
    truncate,
    empty,
    lengthen,
    swap,
    copy_older,
    delete,
    replace_by_pipe,
    replace_by_directory,
    replace_by_link,
    replace_by_device,
]


def restore(folder):
    """(samples of the restored checkpoint, messages). Its arrays are bit for bit those that were saved."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(OLDER))
    messages = []
    signal.alarm(LIMIT_SECONDS)  # ends the tests if a pipe is opened
    restored, manifest = CheckpointManager(folder, Checkpoint(), messages.append).restore(lambda samples: abstract)
    signal.alarm(0)
    for name, array in state(manifest.samples).items():
        assert np.asarray(restored[name]).tobytes() == np.asarray(array).tobytes(), name
    return manifest.samples, messages


def is_detected(damage, file, folder, random):
    """Damage a file of a folder and restore its newest valid checkpoint. Returns whether the content has changed: then the file
    is named, and the previous checkpoint restored."""
    before = file.read_bytes()
    damage(file, folder, random)
    is_changed = not file.is_file() or file.is_symlink() or file.stat().st_size != len(before) or file.read_bytes() != before
    samples, messages = restore(folder)
    if not is_changed:
        assert (samples, messages) == (NEWER, [])
        return False
    assert samples == OLDER
    (message,) = messages
    assert message.startswith(f"skipped the checkpoint of samples {NEWER}: {folder / str(NEWER)}")
    assert message.endswith(f"; renamed to {folder / str(NEWER)}.corrupt")
    assert damage is swap or str(file.relative_to(folder)) in message or file.name == MANIFEST
    assert "\n" not in message
    return True


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_restored(original, tmp_path, damage):
    largest = max(files_of(original, NEWER), key=lambda file: file.stat().st_size)
    for name in (MANIFEST, "state/_METADATA", largest.relative_to(original / str(NEWER))):
        folder = shutil.copytree(original, tmp_path / str(name).replace("/", "_"))
        same_in_both = damage is copy_older and name == "state/_METADATA"
        assert is_detected(damage, folder / str(NEWER) / name, folder, np.random.default_rng(0)) != same_in_both, name


@pytest.mark.slow
def test_random_damages_of_any_files_restore_right_weights(original, tmp_path):
    random, detected = np.random.default_rng(39), 0
    for number in range(RANDOM_DAMAGES):
        folder = shutil.copytree(original, tmp_path / str(number))
        file = random.choice([file for file in files_of(folder, NEWER) if file.stat().st_size])
        detected += is_detected(DAMAGES[number % len(DAMAGES)], file, folder, random)
    assert detected > RANDOM_DAMAGES * 3 / 4


@pytest.mark.parametrize("kind", ["file", "directory", "pipe"])
def test_a_stranger_among_the_files_is_ignored_unless_it_could_block(original, tmp_path, kind):
    folder = shutil.copytree(original, tmp_path / "checkpoints")
    stranger = folder / str(NEWER) / "state/stranger"
    {"file": lambda path: path.write_text("stranger"), "directory": os.mkdir, "pipe": os.mkfifo}[kind](stranger)
    samples, messages = restore(folder)
    assert samples == (OLDER if kind == "pipe" else NEWER)
    assert len(messages) == (kind == "pipe")


@pytest.mark.parametrize("name", ["state", ""])
def test_a_link_to_an_identical_directory_is_corrupt(original, tmp_path, name):
    folder = shutil.copytree(original, tmp_path / "checkpoints")
    path = folder / str(NEWER) / name
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    samples, (message,) = restore(folder)
    assert samples == OLDER
    assert f"{path} is corrupt: " in message
    assert "links are not followed" in message


def test_files_are_verified_below_a_folder_only(original, tmp_path):
    """As on a host that holds only the part which it has written."""
    folder = shutil.copytree(original, tmp_path / "checkpoints")
    (folder / str(NEWER) / "state/_METADATA").unlink()
    verify_files(read_manifest(folder / str(NEWER)), "state/d/")
