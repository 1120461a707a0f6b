"""Resuming in `jaxdp.training.loop`: an interrupted run equals an uninterrupted one bit by bit; what cannot be resumed is
refused."""

import dataclasses
import json
import shutil
from functools import partial

import jax
import numpy as np
import pytest
from helpers.runs import (
    Hidden,
    Recorder,
    damage,
    outcome,
    outcome_of_whole_run,
    read_records,
    tensorboard_scalars,
    train_shown,
    train_until,
    without_timing,
)
from helpers.step import with_parts

import jaxdp
from jaxdp import ConfigError, Stopped, TrainingError, models, train
from jaxdp.callbacks import checks
from jaxdp.checkpoint.listing import checkpoint_paths, latest_valid
from jaxdp.checkpoint.manifest import CorruptCheckpoint
from jaxdp.checkpoint.orbax_io import load_state
from jaxdp.config import Data, Mesh, Phase, Stop
from jaxdp.data.batch_sources import DataError
from jaxdp.distributed.signal_handler import SignalHandler
from jaxdp.inference.checkpoints import choose_checkpoint
from jaxdp.inference.load_run import load_run
from jaxdp.loggers.console import Screen
from jaxdp.optim import loss_scale
from jaxdp.parallel.mesh import make_mesh
from jaxdp.report import report
from jaxdp.run_records import read_log
from jaxdp.training.state import abstract_state


@pytest.mark.parametrize(
    "cuts",
    [
        [{"step": 1}, {"step": 7}, {"step": 8}, {"step": 11}, {"step": 15}],
        [{"evaluated": 56}, {"evaluated": 160}],
    ],
)
def test_resume_after_kills_equals_an_uninterrupted_run(tiny, tmp_path, cuts):
    """50 images an epoch, steps of 8 then 16: checkpoints at 56, 80 (a change of phase), 112 and 160 samples."""
    for cut in cuts:
        train_until(tiny, tmp_path, **cut)
        assert not (tmp_path / "result.json").exists()
    train(tiny, tmp_path)
    assert outcome(tmp_path) == outcome_of_whole_run(tiny)


def test_sessions_that_were_killed_before_they_saved_count(tiny, tmp_path):
    """The first checkpoint is that after step 7."""
    train_until(tiny, tmp_path, step=2)
    train_until(tiny, tmp_path, step=8)
    train_until(tiny, tmp_path, step=8)
    screen = Recorder()
    result = train_shown(tiny, tmp_path, screen=screen)
    assert result.sessions == json.loads((tmp_path / "result.json").read_text())["sessions"] == 4
    assert any(f" in 4 sessions, first step of the last after {result.seconds_to_first_step:.0f} s" in x for x in screen.lines)


def in_phases(config, *, epochs, first_end):
    batch = (Phase(10, until_epoch=first_end), Phase(25))
    return dataclasses.replace(config, epochs=epochs, batch=batch, mesh=Mesh(cpu_devices=1))


@pytest.mark.slow
def test_more_epochs_keep_the_ends_of_phases_before_the_checkpoint(tiny, tmp_path):
    """`--epochs` scales them in the config. The second time the ratio to the first run is another one."""
    train_shown(in_phases(tiny, epochs=2.0, first_end=1.0), tmp_path, screen=Screen(quiet=True))
    for epochs, samples in ((4.0, 200), (6.0, 300)):
        screen, longer = Recorder(), in_phases(tiny, epochs=epochs, first_end=epochs / 2)
        assert train_shown(longer, tmp_path, screen=screen, accept_changes=True).samples == samples
        assert "batch.0 has ended before the checkpoint: it keeps its end, epoch 1" in screen.lines
        train(longer, tmp_path)  # finished: the same config
    batches = {record["samples"]: record["global_batch"] for record in read_records(tmp_path) if "loss" in record}
    assert {batch for samples, batch in batches.items() if samples > 50} == {25}


def test_more_epochs_scale_the_end_of_a_phase_that_has_not_ended(tiny, tmp_path):
    train_until(in_phases(tiny, epochs=2.0, first_end=1.0), tmp_path, step=3)
    train(in_phases(tiny, epochs=4.0, first_end=2.0), tmp_path, accept_changes=True)
    batches = {record["samples"]: record["global_batch"] for record in read_records(tmp_path) if "loss" in record}
    assert {batch for samples, batch in batches.items() if samples <= 100} == {10}
    assert batches[125] == 25


def test_epochs_that_end_a_phase_before_one_that_has_ended_are_refused(tiny, tmp_path):
    train_until(in_phases(tiny, epochs=3.0, first_end=1.5), tmp_path, step=9)
    with pytest.raises(ConfigError, match=r"^epochs=1\.2: batch\.0 has ended at epoch 1\.5, .*; give more epochs"):
        train(in_phases(tiny, epochs=1.2, first_end=0.6), tmp_path, accept_changes=True)


@pytest.mark.slow
def test_phases_of_another_recipe_are_those_of_the_recipe(tiny, tmp_path):
    train_shown(in_phases(tiny, epochs=2.0, first_end=1.0), tmp_path, screen=Screen(quiet=True))
    other = dataclasses.replace(tiny, epochs=4.0, batch=(Phase(5, until_epoch=3.0), Phase(25)), mesh=Mesh(cpu_devices=1))
    train(other, tmp_path, accept_changes=True)
    batches = {record["samples"]: record["global_batch"] for record in read_records(tmp_path) if "loss" in record}
    assert [batches[105], batches[150], batches[175]] == [5, 5, 25]


class SavesFirst(jaxdp.Callback):
    def before_step(self, run, batch):
        if run.progress.steps == 0:
            run.save()


def test_checkpoint_before_the_first_step_can_be_continued_with_changes(tiny, tmp_path):
    train_until(tiny, tmp_path, step=1, callbacks=[SavesFirst()])
    assert latest_valid(tmp_path / "checkpoints").samples == 0
    screen = Recorder()
    train_shown(dataclasses.replace(tiny, epochs=4.0), tmp_path, screen=screen, accept_changes=True)
    assert any("learning rate and batch stay the same here" in line for line in screen.lines)


def train_until_stopped(config, workdir, when):
    """Train, and request a stop after a step or when the screen shows a status. Returns the exception."""

    class StopWhen(Hidden):
        def status(self, text):
            if text == when:
                signals.request_stop("SIGTERM")

        def step(self, record):
            if record["step"] == when:
                signals.request_stop("SIGTERM")

    signals = SignalHandler()
    with pytest.raises(Stopped) as stopped:
        train_shown(config, workdir, screen=StopWhen(), signals=signals)
    return stopped.value


def test_resume_after_stop_requests_equals_an_uninterrupted_run(tiny, tmp_path):
    assert "before the first step of this session" in str(train_until_stopped(tiny, tmp_path, "compiling"))
    for when, samples in ((3, 32), ("evaluating", 56), (10, 80), (15, 160)):  # between steps, one is ahead of the log
        assert "the same command continues from it" in str(train_until_stopped(tiny, tmp_path, when))
        saved = latest_valid(tmp_path / "checkpoints")
        assert saved.metadata["progress"]["evaluation_due"] == (when in ("evaluating", 15))
        assert saved.samples == samples
    train(tiny, tmp_path)
    assert outcome(tmp_path) == outcome_of_whole_run(tiny)


def test_stop_whose_last_step_fails_raises_a_training_error_with_the_checkpoint(tiny, tmp_path, monkeypatch):
    """The metrics of the last step, read after the stop, are not finite."""
    signals, check_step = SignalHandler(), checks.check_step

    def check(record, config):
        if record["step"] == 14:
            raise TrainingError("the loss is not finite")
        if record["step"] == 13:
            signals.request_stop("SIGTERM")
        check_step(record, config)

    monkeypatch.setattr(checks, "check_step", check)
    advice = "to resume from it with changes, use --resume"
    with pytest.raises(TrainingError, match=rf"^the loss is not finite; the last valid checkpoint is .*; {advice}"):
        train_shown(tiny, tmp_path, signals=signals)


@pytest.mark.slow
def test_resume_restores_averages_loss_scale_and_counts(tiny_resnet, tmp_path, monkeypatch):
    for name, value in {"INITIAL": 2.0**24, "GROWTH_STEPS": 4}.items():
        monkeypatch.setattr(loss_scale, name, value)
    optimizer = {"average_decay": 0.9, "average_start": "initial", "loss_scale": "dynamic"}
    config = with_parts(tiny_resnet, optimizer=optimizer, model={"dtype": "float16"})
    train(config, tmp_path / "whole")
    for step in (9, 12):
        train_until(config, tmp_path / "cut", step=step)
    train(config, tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    assert outcome(tmp_path / "cut")[1]["skipped_steps"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(cpu_devices=2), Mesh(1, 4, 4), Mesh(4, 1, 8)])
def test_resume_on_another_mesh_keeps_the_schedule_and_agrees_in_parameters(tiny, tmp_path, mesh):
    """Batch normalization over workers of 2 images; at least 20 steps after the resume, in float32."""
    batch = (Phase(8, 1.5, per_worker_batch=2), Phase(16, per_worker_batch=2))
    config = dataclasses.replace(tiny, epochs=8.0, batch=batch)
    train_until(config, tmp_path / "here", step=12)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    train(config, tmp_path / "here")
    train(dataclasses.replace(config, mesh=mesh), tmp_path / "there")
    exact = ("step", "samples", "epoch", "phase", "learning_rate", "momentum", "global_batch")

    def schedule_of(name):
        lines = read_log(tmp_path / name / "metrics.jsonl")
        return [{field: line[field] for field in exact} for line in lines if "loss" in line]

    here, there = schedule_of("here"), schedule_of("there")
    assert here == there
    assert len(here) - 10 >= 20
    expected, resumed = (load_run(tmp_path / name, config=config)[0].params for name in ("here", "there"))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_allclose(np.linalg.norm(a - b), 0, atol=1e-4 * max(np.linalg.norm(a), 1e-3))


def test_resume_with_a_changed_config_raises_unless_accepted(tiny, tmp_path):
    train_until(tiny, tmp_path, step=12)
    changed = with_parts(tiny, schedule={"learning_rate": 1.0})
    with pytest.raises(ConfigError, match=r"different run \(schedule.learning_rate: 2 -> 1\).*--accept-changes"):
        train(changed, tmp_path)
    screen = Recorder()
    train_shown(changed, tmp_path, screen=screen, accept_changes=True)
    assert "resuming with changes: schedule.learning_rate: 2 -> 1" in screen.lines
    rates = [record["learning_rate"] for record in read_log(tmp_path / "metrics.jsonl") if "loss" in record]
    whole = jaxdp.plan(tiny), jaxdp.plan(changed)
    assert rates == [whole[n >= 10].learning_rate(8 * n if n < 10 else 80 + 16 * (n - 10)) for n in range(15)]


def test_resume_accepts_changed_checkpoint_and_logging_settings(tiny, tmp_path):
    train_until(tiny, tmp_path, step=12)
    train(with_parts(tiny, checkpoint={"every_epochs": 0.64, "keep": 9}, logging={"every_steps": 5}), tmp_path)
    assert [int(path.name) for path in checkpoint_paths(tmp_path / "checkpoints")][:2] == [160, 128]


def test_resume_with_another_optimizer_raises_even_if_changes_are_accepted(tiny, tmp_path):
    train_until(tiny, tmp_path / "run", step=9)
    sgd = with_parts(tiny, optimizer={"name": "sgd"})
    for where in ({"workdir": tmp_path / "run"}, {"workdir": tmp_path / "next", "resume": str(tmp_path / "run")}):
        with pytest.raises(ConfigError) as caught:
            train(sgd, accept_changes=True, **where)
        assert (caught.value.field, caught.value.value) == ("optimizer.name", "sgd")
        assert "is lars, whose state sgd cannot continue from" in caught.value.reason
        assert "opt_state" not in str(caught.value)


def test_resume_with_another_start_of_the_average_raises(tiny, tmp_path):
    averaged = with_parts(tiny, optimizer={"average_decay": 0.9})
    train_until(averaged, tmp_path, step=9)
    with pytest.raises(ConfigError, match=r"use --optimizer\.average-start unbiased") as caught:
        train(with_parts(averaged, optimizer={"average_start": "warmup"}), tmp_path, accept_changes=True)
    assert caught.value.field == "optimizer.average_start"


def stopped_early(config, workdir):
    """The second evaluation has a larger loss, and ends the run."""
    assert train(dataclasses.replace(config, stop=Stop(metric="eval_loss", patience=1)), workdir).stopped_early


@pytest.mark.parametrize(
    ("end", "elsewhere"),
    [
        (train, False),
        (stopped_early, False),
        (partial(train_until_stopped, when="evaluating"), True),
        (partial(train_until_stopped, when=15), False),  # before the last evaluation
    ],
)
def test_continuing_with_changes_keeps_every_line_up_to_the_checkpoint(tiny, tmp_path, end, elsewhere):
    config = with_parts(tiny, logging={"tensorboard": True})
    end(config, tmp_path / "run")
    samples = latest_valid(tmp_path / "run/checkpoints").samples
    before = [line for line in read_log(tmp_path / "run/metrics.jsonl") if line["samples"] <= samples]
    longer = dataclasses.replace(config, epochs=4.0)
    if elsewhere:
        train(longer, tmp_path / "longer", resume=tmp_path / "run", accept_changes=True)
    else:
        (tmp_path / "run").rename(tmp_path / "longer")
        train(longer, tmp_path / "longer", accept_changes=True)
    log = read_log(tmp_path / "longer/metrics.jsonl")
    assert log[: len(before)] == before
    evaluated = [line["samples"] for line in log if "eval_loss" in line]
    assert evaluated == [56, 112, 160, 208]
    if not elsewhere:
        shown = tensorboard_scalars(tmp_path / "longer/tensorboard")
        assert [*shown["evaluation/loss"]] == evaluated
        assert [*shown["training/loss"]] == [line["samples"] for line in log if "loss" in line]
        assert report(tmp_path / "longer")["best_epoch"] == choose_checkpoint(tmp_path / "longer", "best").epoch


def test_evaluation_of_a_session_killed_before_its_save_is_repeated_and_logged_once(tiny, tmp_path):
    """The checkpoint was saved during the last evaluation, which the next session finished before it was killed."""
    train_until_stopped(tiny, tmp_path / "cut", 15)
    train_until(tiny, tmp_path / "cut", evaluated=160)
    log = outcome_of_whole_run(tiny)[0]
    assert [without_timing(record) for record in read_records(tmp_path / "cut")] == log
    train_until(tiny, tmp_path / "cut", evaluated=160)
    assert [without_timing(record) for record in read_records(tmp_path / "cut")] == log
    train(tiny, tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome_of_whole_run(tiny)


class LogsAndFails(jaxdp.Callback):
    """Logs a number after an evaluation; fails after one step if asked to."""

    def __init__(self, number, fails_after=None):
        self.number, self.fails_after = number, fails_after

    def after_evaluation(self, run, evaluation):
        run.log(number=self.number)
        if evaluation["step"] == self.fails_after:
            raise ValueError("repair me")


@pytest.mark.parametrize("step", [12, *(pytest.param(step, marks=pytest.mark.slow) for step in (7, 15))])
def test_evaluation_in_which_a_callback_failed_is_repeated_and_logged_and_counted_once(tiny, tmp_path, step):
    """The repaired callback logs another number; no evaluation counts twice for early stopping. The loss after step 12 does not
    improve, so counting it twice would end the run there."""
    config = dataclasses.replace(tiny, stop=Stop(metric="eval_loss", patience=2))
    with pytest.raises(TrainingError, match="repair me"):
        train(config, tmp_path / "cut", callbacks=[LogsAndFails(1, fails_after=step)])
    saved = latest_valid(tmp_path / "cut/checkpoints").metadata["progress"]
    assert (saved["steps"], saved["evaluation_due"], saved["not_improved"]) == (step, True, step == 15)
    train(config, tmp_path / "cut", callbacks=[LogsAndFails(2)])
    numbers = [(line["step"], line["number"]) for line in read_log(tmp_path / "cut/metrics.jsonl") if "eval_loss" in line]
    assert numbers == [(each, 1 if each < step else 2) for each in (7, 12, 15)]
    train(config, tmp_path / "whole", callbacks=[LogsAndFails(2)])
    (log, *_), (whole, *_) = outcome(tmp_path / "cut"), outcome(tmp_path / "whole")
    assert [line | {"number": None} for line in log] == [line | {"number": None} for line in whole]
    for name in ("best", "not_improved"):
        of_runs = [latest_valid(tmp_path / run / "checkpoints").metadata["progress"][name] for run in ("cut", "whole")]
        assert of_runs[0] == of_runs[1]


def test_resume_from_another_run_equals_an_uninterrupted_run(tiny, tmp_path):
    train_until(tiny, tmp_path / "first", step=12)
    train(tiny, tmp_path / "second", resume=str(tmp_path / "first"))
    assert outcome(tmp_path / "second") == outcome_of_whole_run(tiny)
    train(tiny, tmp_path / "third", resume=str(tmp_path / "first/checkpoints/56"))
    assert outcome(tmp_path / "third") == outcome_of_whole_run(tiny)
    train_until(tiny, tmp_path / "fourth", resume=str(tmp_path / "first/checkpoints/56"), step=12)
    screen = Recorder()
    train_shown(tiny, tmp_path / "fourth", resume=str(tmp_path / "first/checkpoints/56"), screen=screen)
    assert outcome(tmp_path / "fourth") == outcome_of_whole_run(tiny)
    assert any("fourth/checkpoints/80" in text for text in screen.lines)  # its own newest, not the origin again


def test_resume_from_an_invalid_origin_raises_one_line(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    train_until(tiny, tmp_path / "first", step=9)
    for origin, change, message in (
        ("empty", {}, "empty': it holds no valid checkpoint"),
        ("first", {"seed": 4}, r"it is of a different run \(seed: 0 -> 4\); use --accept-changes"),
        ("new", {}, "it belongs to the directory of this run; use a new --workdir"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            train(dataclasses.replace(tiny, **change), tmp_path / "new", resume=str(tmp_path / origin))
        assert "\n" not in str(error.value)


# damage


def test_resume_with_a_damaged_checkpoint_equals_an_uninterrupted_run(tiny, tmp_path):
    train_until(tiny, tmp_path / "run", step=13)
    newest = checkpoint_paths(tmp_path / "run/checkpoints")[0]
    damage(newest)
    screen = Recorder()
    train_shown(tiny, tmp_path / "run", screen=screen)
    assert any("skipped the checkpoint" in text for text in screen.lines)
    assert outcome(tmp_path / "run") == outcome_of_whole_run(tiny)


def test_load_state_of_changed_arrays_with_matching_files_raises(tiny, tmp_path):
    """Array checksums are independent of file checksums: these files belong to another run, with matching file checksums."""
    for seed in (0, 1):
        train_until(dataclasses.replace(tiny, seed=seed), tmp_path / str(seed), step=12)
    ours, theirs = (latest_valid(tmp_path / str(seed) / "checkpoints") for seed in (0, 1))
    forged = dataclasses.replace(theirs, arrays=ours.arrays)
    with pytest.raises(CorruptCheckpoint, match=r"the checksum of the array .* does not match"):
        load_state(forged, abstract_state(tiny, models.create(tiny.model), make_mesh(2, 2)))


def test_resume_with_all_checkpoints_damaged_raises_and_changes_nothing(tiny, tmp_path):
    train_until(tiny, tmp_path, step=12)
    log = (tmp_path / "metrics.jsonl").read_bytes()
    for path in checkpoint_paths(tmp_path / "checkpoints"):
        (path / "manifest.json").unlink()
    with pytest.raises(TrainingError, match=r"no checkpoint in .* is valid .*manifest.json cannot be read.*--resume never"):
        train(tiny, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == log


class OneBroken:
    broken = True

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 7 and self.broken:
            return b"broken", 0
        return np.full((20, 24), 30 * (index % 6), np.uint8), index % 6


@pytest.mark.slow
def test_resume_after_a_bad_image_equals_an_uninterrupted_run(tiny, tmp_path):
    config = dataclasses.replace(tiny, batch=(Phase(8),), data=Data(image_size=80, augmentation="none"))
    source = OneBroken()
    with pytest.raises(
        DataError, match=r"training image 7 cannot be used: .*; (the last valid checkpoint|there is no checkpoint)"
    ):
        train(config, tmp_path / "cut", datasets=(source, source))
    source.broken = False
    train(config, tmp_path / "cut", datasets=(source, source))
    train(config, tmp_path / "whole", datasets=(source, source))
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_resume_with_skipped_images_keeps_their_list(tiny, tmp_path):
    data = Data(image_size=80, augmentation="none", on_bad_image="skip")
    config = dataclasses.replace(with_parts(tiny, schedule={"warmup_epochs": 0.5}), epochs=2.0, batch=(Phase(8),), data=data)
    datasets = (OneBroken(), OneBroken())
    train_until(config, tmp_path / "cut", datasets=datasets, step=7)
    train(config, tmp_path / "cut", datasets=datasets)
    train(config, tmp_path / "whole", datasets=datasets)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    assert list(outcome(tmp_path / "cut")[1]["bad_images"]) == ["training image 7", "evaluation image 7"]
