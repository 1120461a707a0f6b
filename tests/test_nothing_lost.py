"""What refusals, damage and kills at awkward moments must leave as it was."""

import dataclasses
import errno
import json
import shutil
import threading
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxdp.config import ConfigError, Data, Mesh, Phase, Reduce
from jaxdp.training import checkpoint, loop, seal
from jaxdp.training.console import Quiet
from jaxdp.training.guard import TrainingError
from jaxdp.training.metrics import JsonLines, read_log
from jaxdp.training.restored import chosen, evaluate, listed
from jaxdp.training.session import train


class Cut(Exception):
    pass


class CutAt(Quiet):
    """Cuts a run off when it has logged a step; keeps what was said."""

    def __init__(self, step=None):
        self.at, self.said = step, []

    def say(self, text):
        self.said.append(text)

    def step(self, record):
        if record["step"] == self.at:
            raise Cut


def cut(config, workdir, step=12):
    with pytest.raises(Cut):
        train(config, workdir, screen=CutAt(step))


def names(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def damage(path):
    """A checkpoint's largest file, one bit of it changed."""
    flip(max((file for file in (path / "state").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size))


def test_where_all_checkpoints_are_damaged_a_second_try_stops_as_the_first_did(tiny, tmp_path):
    cut(tiny, tmp_path)
    for path in seal.directories(tmp_path / "checkpoints"):
        flip(path / "seal.json")
    before, log = names(tmp_path), (tmp_path / "metrics.jsonl").read_bytes()
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"is sound .*give --resume never to begin anew$"):
            train(tiny, tmp_path)
    assert (names(tmp_path), (tmp_path / "metrics.jsonl").read_bytes()) == (before, log)


def test_an_error_that_is_not_damage_condemns_no_checkpoint(tiny, tmp_path, monkeypatch):
    cut(tiny, tmp_path)
    before = names(tmp_path)

    def no_memory(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointer, "restore", no_memory)
        with pytest.raises(TrainingError, match="cannot be read, though no file of it is damaged: RESOURCE_EXHAUSTED"):
            train(tiny, tmp_path)
    assert names(tmp_path) == before
    with monkeypatch.context() as patch:

        def denied(path):
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(seal, "checksum", denied)
        with pytest.raises(TrainingError, match="cannot be read: Input/output error"):
            train(tiny, tmp_path)
    assert names(tmp_path) == before
    train(tiny, tmp_path)


def test_refused_changes_leave_a_finished_run_as_it_was(tiny, tmp_path):
    train(tiny, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("config.json", "result.json", "metrics.jsonl")}
    wider = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, width=8))
    shorter = dataclasses.replace(tiny, epochs=2.0)
    for other, message in ((wider, "and the run wants"), (shorter, "epochs: 2 is not allowed; .* is at epoch 3")):
        with pytest.raises(ConfigError, match=message):
            train(other, tmp_path, accept_changes=True)
        assert {name: (tmp_path / name).read_bytes() for name in before} == before


@pytest.mark.slow
def test_accepted_changes_of_the_evaluation_are_evaluated(tiny, tmp_path):
    train(tiny, tmp_path)
    other = dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, eval_examples=11))
    result = train(other, tmp_path, accept_changes=True)
    assert result.eval_examples == 11
    last = [line for line in read_log(tmp_path / "metrics.jsonl") if line["samples"] == result.samples and "eval_loss" in line]
    assert [line["eval_examples"] for line in last] == [11]


def test_a_kill_between_sealing_and_naming_loses_nothing(tiny, tmp_path):
    cut(tiny, tmp_path)
    newest = seal.newest_good(tmp_path / "checkpoints")
    folder, samples = newest.path.parent, newest.samples
    newest.path.rename(folder / f"saving-{samples}")  # sealed, and not yet named
    (folder / f"saving-{samples}-replaced").mkdir()  # the one of the same samples before it
    (folder / "saving-9999").mkdir()  # not sealed
    screen = CutAt()
    train(tiny, tmp_path, screen=screen)
    assert any(f"going on from {folder / str(samples)}" in line for line in screen.said)
    assert not list(folder.glob("saving-*"))


@pytest.mark.slow
def test_a_checkpoint_saved_again_takes_the_place_of_the_one_before(tiny, tmp_path, monkeypatch):
    """And is there at every moment: nothing is removed before the new one has its name."""
    cut(tiny, tmp_path)
    newest = seal.newest_good(tmp_path / "checkpoints")
    there, remove = [], shutil.rmtree

    def watched(path, *arguments, **options):
        sound = newest.path / "seal.json"
        if newest.path.name in str(path):
            there.append(sound.exists())
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    saved = newest.path.with_name(f"saving-{newest.samples}")
    shutil.copytree(newest.path, saved)
    kept = checkpoint.Checkpoints(newest.path.parent, tiny.checkpoint, print)
    (saved / "seal.json").unlink()
    assert kept._seal(saved, newest.samples, newest.told, newest.arrays, lambda: None) is None
    assert there
    assert all(there[1:])  # the first removes what an earlier kill may have left
    assert seal.is_sound(seal.newest_good(newest.path.parent))


def test_other_devices_keep_the_per_worker_batch_with_which_the_run_was_begun(tiny, tmp_path):
    """Without per_worker_batch in the config: the groups of batch normalisation are those of four devices to the end."""
    whole = train(tiny, tmp_path / "whole")
    cut(tiny, tmp_path / "cut")
    on_two = dataclasses.replace(tiny, mesh=Mesh(cpu_devices=2))
    other = train(on_two, tmp_path / "cut")
    assert other.devices == 2
    assert other.loss == pytest.approx(whole.loss, rel=1e-4)
    losses = [
        [line["loss"] for line in read_log(tmp_path / name / "metrics.jsonl") if "loss" in line] for name in ("whole", "cut")
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.slow
def test_the_type_on_the_wire_is_no_harmless_change(tiny, tmp_path):
    cut(tiny, tmp_path)
    with pytest.raises(ConfigError, match=r"reduce\.wire_dtype: 'float32' -> 'bfloat16'"):
        train(dataclasses.replace(tiny, reduce=Reduce(wire_dtype="bfloat16")), tmp_path)


class Images:
    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return np.full((16, 16, 3), 40 * (index % 6), np.uint8), index % 6


@pytest.mark.slow
def test_other_data_are_refused_and_shown(tiny, tmp_path):
    config = dataclasses.replace(tiny, data=Data(image_size=16, augmentation="none"), batch=(Phase(8),))
    with pytest.raises(Cut):
        train(config, tmp_path, screen=CutAt(12), datasets=(Images(50), Images(10)))
    with pytest.raises(ConfigError, match=r"other data \(training data: 50 images, \w+ -> 51 images, \w+\).*--accept-changes"):
        train(config, tmp_path, datasets=(Images(51), Images(10)))
    result = train(config, tmp_path, datasets=(Images(51), Images(10)), accept_changes=True)
    assert train(config, tmp_path, datasets=(Images(51), Images(10))) == result
    with pytest.raises(ConfigError, match=r"other data \(training data: 51 images, \w+ -> 50 images"):  # finished, or not
        train(config, tmp_path, datasets=(Images(50), Images(10)))


@pytest.mark.slow
def test_damaged_lines_of_the_log_are_counted_and_the_others_kept(tiny, tmp_path):
    cut(tiny, tmp_path)
    log = tmp_path / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[1], lines[3] = lines[1].replace(b'"samples"', b'"sbmples"'), lines[3].replace(b'"samples"', b'"samples')
    log.write_bytes(b"".join(lines))
    screen = CutAt()
    result = train(tiny, tmp_path, screen=screen)
    assert any("2 lines of" in line and "could not be read" in line for line in screen.said)
    steps = [line["step"] for line in read_log(log) if "loss" in line]
    assert steps == [1, 3, *range(5, result.steps + 1)] or len(steps) == result.steps - 2


@pytest.mark.slow
def test_an_exploded_loss_keeps_its_checkpoint_and_is_told_once_over_all_sessions(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.guard.LossWatch, "WINDOW", 5)
    config = dataclasses.replace(
        tiny, guard=dataclasses.replace(tiny.guard, exploding=1.0001), checkpoint=dataclasses.replace(tiny.checkpoint, keep=1)
    )
    first, second = CutAt(13), CutAt()
    with pytest.raises(Cut):
        train(config, tmp_path, screen=first)
    told = [line for line in first.said if "exploded" in line]
    assert len(told) == 1
    train(config, tmp_path, screen=second)
    sealed = seal.newest_good(tmp_path / "checkpoints")
    if "told_exploded" in sealed.told["progress"] and sealed.told["progress"]["pinned"]:
        assert str(sealed.told["progress"]["pinned"][0]) in names(tmp_path)


@pytest.mark.slow
def test_going_on_from_a_finished_run_elsewhere_leaves_a_checkpoint_here(tiny, tmp_path):
    train(tiny, tmp_path / "first")
    train(tiny, tmp_path / "second", resume=str(tmp_path / "first"))
    assert seal.newest_good(tmp_path / "second/checkpoints") is not None


def test_the_newest_sound_one_is_taken_where_a_newer_is_damaged_and_both_are_told(tiny, tmp_path, capsys):
    train(tiny, tmp_path / "first")
    newest, before, *_ = seal.directories(tmp_path / "first/checkpoints")
    damage(newest)
    assert chosen(tmp_path / "first").path == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxdp: {before} is used, not the newest: {newest}")
    screen = CutAt()
    train(tiny, tmp_path / "second", resume=str(tmp_path / "first"), screen=screen)
    assert any(f"going on from {before}" in line for line in screen.said)
    assert [row["damage"] is None for row in listed(tmp_path / "first")][-2:] == [True, False]
    (newest / seal.SEAL).write_text("no seal")
    assert evaluate(None, tmp_path / "first")["checkpoint"] == str(before)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"jaxdp: {before} is used, not the newest: {newest / seal.SEAL} is damaged"


def test_a_full_disk_keeps_log_lines_until_there_is_space(tmp_path):
    said = []
    log = JsonLines(tmp_path / "metrics.jsonl", patient=True, say=said.append)
    log.write({"samples": 1})
    real, full = log.file, True

    class Disk:
        name = real.name

        def write(self, data):
            if full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real.write(data[:7])  # a little at a time

        def close(self):
            real.close()

    log.file = Disk()
    log.write({"samples": 2})
    log.write({"samples": 3})
    assert len(said) == 1
    full = False
    log.write({"samples": 4})
    log.close()
    assert [json.loads(line)["samples"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    strict = JsonLines(tmp_path / "other.jsonl")
    full, real = True, strict.file
    strict.file = Disk()
    with pytest.raises(OSError, match="No space left"):
        strict.write({"samples": 1})
    full = False
    strict.close()


@pytest.mark.slow
def test_the_watchdog_guards_the_first_images_and_the_evaluation(tiny, tmp_path, monkeypatch):
    guarded = []
    monkeypatch.setattr(loop.Watchdog, "busy", lambda self, what: guarded.append(what))
    train(tiny, tmp_path)
    first = guarded.index("loading the first images of phase 0")
    assert guarded[first + 1].startswith("step 1 of phase 0")
    assert "a batch of the evaluation" in guarded


def test_lines_written_while_a_save_syncs_the_log_come_once_and_in_order(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    real, ended = log.file, threading.Event()

    class Slow:
        name, fileno, close = real.name, real.fileno, real.close

        def write(self, data):
            time.sleep(0.001)
            return real.write(data)

    log.file = Slow()

    def sync():
        while not ended.is_set():
            log.sync()

    saving = threading.Thread(target=sync)
    saving.start()
    for samples in range(200):
        log.write({"samples": samples})
    ended.set()
    saving.join()
    log.close()
    assert [line["samples"] for line in read_log(tmp_path / "metrics.jsonl")] == list(range(200))
