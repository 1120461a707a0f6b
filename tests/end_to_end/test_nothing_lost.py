"""Errors, damaged files and kills change or lose no checkpoint and no line of the log."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import threading
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.runs import Recorder, damage, train_shown, train_until

from jaxdp.callbacks import checks
from jaxdp.checkpoint import manifest
from jaxdp.checkpoint.listing import checkpoint_paths, latest_valid
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.manifest import MANIFEST
from jaxdp.cli.main import main
from jaxdp.config import Data, Mesh, Phase
from jaxdp.errors import ConfigError, TrainingError
from jaxdp.inference.checkpoints import choose_checkpoint, list_checkpoints
from jaxdp.inference.evaluate import evaluate
from jaxdp.loggers.default import JsonLines
from jaxdp.report import as_text, report
from jaxdp.report.cards import card
from jaxdp.report.follow import WatchedRun
from jaxdp.run_records import read_log
from jaxdp.session.train import train


def names(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def test_temporary_read_errors_quarantine_no_checkpoint(tiny, tmp_path, monkeypatch):
    train_until(tiny, tmp_path, step=12)
    before = names(tmp_path)

    def no_memory(*_, **more):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "restore", no_memory)
        with pytest.raises(TrainingError, match="cannot be read although its checksums match: RESOURCE_EXHAUSTED"):
            train(tiny, tmp_path)
    assert names(tmp_path) == before
    with monkeypatch.context() as patch:

        def denied(path, expected_bytes):
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(manifest, "file_checksum", denied)
        with pytest.raises(TrainingError, match="cannot be read: Input/output error"):
            train(tiny, tmp_path)
    assert names(tmp_path) == before
    train(tiny, tmp_path)


def test_refused_changes_leave_a_finished_run_as_it_was(tiny, tmp_path):
    train(tiny, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("config.json", "result.json", "metrics.jsonl")}
    smaller = dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, image_size=8))  # fewer inputs of its network
    shorter = dataclasses.replace(tiny, epochs=2.0)
    for other, message in ((smaller, "but the run expects"), (shorter, "epochs=2.0: .* is at epoch 3")):
        with pytest.raises(ConfigError, match=message):
            train(other, tmp_path, accept_changes=True)
        assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_accepted_change_of_the_evaluation_data_evaluates_again(tiny, tmp_path):
    train(tiny, tmp_path)
    other = dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, eval_examples=11))
    result = train(other, tmp_path, accept_changes=True)
    assert result.eval_examples == 11
    last = [line for line in read_log(tmp_path / "metrics.jsonl") if line["samples"] == result.samples and "eval_loss" in line]
    assert [line["eval_examples"] for line in last] == [23, 11]
    assert choose_checkpoint(tmp_path, "newest").metadata["evaluation"]["eval_examples"] == 11


def test_saving_the_same_samples_again_replaces_the_checkpoint_atomically(tiny, tmp_path, monkeypatch):
    """A checkpoint of these samples exists at every moment: the old one is removed after the new one is renamed."""
    train_until(tiny, tmp_path, step=12)
    newest = latest_valid(tmp_path / "checkpoints")
    existed, remove = [], shutil.rmtree

    def record_and_remove(path, *arguments, **options):
        manifest_file = newest.path / "manifest.json"
        if newest.path.name in str(path):
            existed.append(manifest_file.exists())
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", record_and_remove)
    saved = newest.path.with_name(f"saving-{newest.samples}")
    shutil.copytree(newest.path, saved)
    manager = CheckpointManager(newest.path.parent, tiny.checkpoint, print)
    (saved / "manifest.json").unlink()
    assert manager._complete(dataclasses.replace(newest, path=saved), before_manifest=lambda: None) is None
    assert existed
    assert all(existed[1:])  # the first removes what an earlier kill may have left
    assert latest_valid(newest.path.parent).samples == newest.samples


def test_resume_on_other_devices_keeps_the_per_worker_batch(tiny, tmp_path):
    """Without per_worker_batch in the config, the groups of batch normalization stay as on four devices."""
    whole = train(tiny, tmp_path / "whole")
    train_until(tiny, tmp_path / "cut", step=12)
    on_two = dataclasses.replace(tiny, mesh=Mesh(cpu_devices=2))
    other = train(on_two, tmp_path / "cut")
    assert other.devices == 2
    assert other.loss == pytest.approx(whole.loss, rel=1e-4)
    losses = [
        [line["loss"] for line in read_log(tmp_path / name / "metrics.jsonl") if "loss" in line] for name in ("whole", "cut")
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


class Images:
    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return np.full((16, 16, 3), 40 * (index % 6), np.uint8), index % 6


def test_resume_with_other_data_raises_unless_accepted(tiny, tmp_path):
    config = dataclasses.replace(tiny, data=Data(image_size=16, augmentation="none"), batch=(Phase(8),))
    train_until(config, tmp_path, step=12, datasets=(Images(50), Images(10)))
    with pytest.raises(ConfigError, match=r"other data \(training data: 50 images, \w+ -> 51 images, \w+\).*--accept-changes"):
        train(config, tmp_path, datasets=(Images(51), Images(10)))
    result = train(config, tmp_path, datasets=(Images(51), Images(10)), accept_changes=True)
    assert train(config, tmp_path, datasets=(Images(51), Images(10))) == result
    with pytest.raises(ConfigError, match=r"other data \(training data: 51 images, \w+ -> 50 images"):  # finished, or not
        train(config, tmp_path, datasets=(Images(50), Images(10)))


def test_resume_with_damaged_log_lines_drops_and_counts_them(tiny, tmp_path):
    train_until(tiny, tmp_path, step=12)
    log = tmp_path / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[1], lines[3] = lines[1].replace(b'"samples"', b'"sbmples"'), lines[3].replace(b'"samples"', b'"samples')
    log.write_bytes(b"".join(lines))
    screen = Recorder()
    result = train_shown(tiny, tmp_path, screen=screen)
    assert f"left out 2 damaged lines of {log}" in screen.lines
    assert not any("lacks" in line for line in screen.lines)
    steps = [line["step"] for line in read_log(log) if "loss" in line]
    assert steps == [1, 3, *range(5, result.steps + 1)]


LOSSES = {
    "missing": lambda log: log.unlink(),
    "empty": lambda log: log.write_bytes(b""),
    "truncated": lambda log: log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:4])),
    "beginning": lambda log: log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[-4:])),
    "link": lambda log: (log.unlink(), log.symlink_to("nowhere")),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_lost_log_is_named_by_resume_by_a_finished_run_and_by_report_and_watch(tiny, tmp_path, lose):
    train_until(tiny, tmp_path, step=12)
    log, first, again, finished = tmp_path / "metrics.jsonl", Recorder(), Recorder(), Recorder()
    saved = latest_valid(tmp_path / "checkpoints").samples

    def before_checkpoint():
        return sum(record["samples"] <= saved for record in read_log(log)) if log.exists() else 0

    lost = before_checkpoint()
    lose(log)
    lost -= before_checkpoint()
    train_shown(tiny, tmp_path, screen=first)
    line = f"{log} lacks {lost} records that the run had written by its checkpoint"
    assert [each for each in first.lines if "lacks" in each] == [line]
    train_shown(tiny, tmp_path, screen=again)
    assert line in again.lines  # the log stays without them
    run = WatchedRun(tmp_path, "run")
    run.refresh()
    assert run.history.lost == report(tmp_path)["lost_lines"] == int(card(run.seen()).facts["lost log lines"]) == lost
    assert as_text(report(tmp_path)).endswith(f"metrics.jsonl lacks {lost} records that the run had written")
    remaining = len(read_log(log))
    lose(log)
    total, left = remaining + lost, len(read_log(log)) if log.exists() else 0
    assert train_shown(tiny, tmp_path, screen=finished).steps == 15
    assert f"{log} lacks {total - left} records that the run had written by its checkpoint" in finished.lines
    if not log.exists():
        with pytest.raises(ConfigError, match=r"its metrics\.jsonl is missing"):
            report(tmp_path)


def test_log_of_interrupted_runs_lacks_nothing(tiny, tmp_path):
    """Killed before and after a save, and at an evaluation; continued with more epochs and in another directory."""
    screen = Recorder()
    for stop in ({"step": 4}, {"step": 12}, {"evaluated": 50}, {"step": 14}):
        with contextlib.suppress(AssertionError, pytest.fail.Exception):
            train_until(tiny, tmp_path / "run", **stop)
    train_shown(tiny, tmp_path / "run", screen=screen)
    train_shown(dataclasses.replace(tiny, epochs=4.0), tmp_path / "run", screen=screen, accept_changes=True)
    more = dataclasses.replace(tiny, epochs=5.0)
    train_shown(more, tmp_path / "other", screen=screen, resume=tmp_path / "run", accept_changes=True)
    assert not any("lacks" in line for line in screen.lines)
    for name in ("run", "other"):
        records = latest_valid(tmp_path / name / "checkpoints").metadata["progress"]["records"]
        assert records == len(read_log(tmp_path / name / "metrics.jsonl"))


def test_log_that_cannot_be_read_stops_a_resume_before_its_result_is_deleted(tiny, tmp_path):
    train(tiny, tmp_path)
    log, more, screen = tmp_path / "metrics.jsonl", dataclasses.replace(tiny, epochs=4.0), Recorder()
    for damaged in (
        lambda: os.truncate(log, 2**40),
        lambda: (log.unlink(), os.mkfifo(log)),
        lambda: (log.unlink(), log.mkdir()),
    ):
        damaged()
        before = {name: (tmp_path / name).read_bytes() for name in ("config.json", "result.json")}
        for call in (lambda: train(more, tmp_path, accept_changes=True), lambda: report(tmp_path)):
            with pytest.raises(ConfigError, match=r"its metrics\.jsonl cannot be read \((Is a dir|File too|not a reg)"):
                call()
        assert {name: (tmp_path / name).read_bytes() for name in before} == before
        train_shown(tiny, tmp_path, screen=screen)
        assert any(line.startswith(f"{tmp_path}: its metrics.jsonl cannot be read") for line in screen.lines)
        screen.lines.clear()


def test_exploded_loss_warns_once_over_all_sessions(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checks.LossWatch, "WINDOW", 5)
    monkeypatch.setattr(checks, "EXPLODED", 1.0001)
    first, second = train_until(tiny, tmp_path, step=13), Recorder()
    train_shown(tiny, tmp_path, screen=second)
    assert sum("the loss has exploded" in line for line in first.lines) == 1
    assert not any("the loss has exploded" in line for line in second.lines)


def test_evaluate_with_corrupt_newest_checkpoint_uses_the_previous_one_and_reports_it(tiny, tmp_path, capsys):
    train(tiny, tmp_path / "first")
    newest, before, *_ = checkpoint_paths(tmp_path / "first/checkpoints")
    damage(newest)
    assert choose_checkpoint(tmp_path / "first").path == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxdp: using {before} instead of the result checkpoint: {newest}")
    screen = Recorder()
    train_shown(tiny, tmp_path / "second", resume=str(tmp_path / "first"), screen=screen)
    assert any(f"resuming from {before}" in line for line in screen.lines)
    assert [row["error"] is None for row in list_checkpoints(tmp_path / "first")][-2:] == [True, False]
    main(["checkpoints", "--workdir", str(tmp_path / "second")])
    for arguments in ([], ["--json"]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main(["checkpoints", "--workdir", str(tmp_path / "first"), *arguments])
        assert exit.value.code == 1
        assert "corrupt: it was changed after it was written" in " ".join(capsys.readouterr().out.split())
    (newest / MANIFEST).write_text("not a manifest")
    assert evaluate(None, tmp_path / "first")["checkpoint"] == str(before)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"jaxdp: using {before} instead of the result checkpoint: {newest / MANIFEST} is corrupt: wrong checksum"


def test_a_full_disk_keeps_log_lines_until_there_is_space(tmp_path):
    messages = []
    log = JsonLines(tmp_path / "metrics.jsonl", buffer_when_full=True, info=messages.append)
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
    assert len(messages) == 1
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


def test_log_written_during_syncs_has_every_line_once_in_order(tmp_path):
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
