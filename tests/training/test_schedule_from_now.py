"""A finished run that continues with a schedule that begins anew, compared with optax's schedules."""

import dataclasses
import shutil

import numpy as np
import optax
import pytest
from helpers.runs import Recorder, damage, outcome, read_records, train_shown, train_until
from helpers.step import with_parts

import jaxdp
from jaxdp import ConfigError, train
from jaxdp.checkpoint.listing import checkpoint_paths
from jaxdp.config import Mesh, Phase, Schedule
from jaxdp.loggers.console import Screen
from jaxdp.setup.run_dir import run_config


@pytest.fixture
def short(tiny):
    """Epochs of 50 images in steps of ten, a checkpoint after each epoch."""
    config = dataclasses.replace(tiny, epochs=1.0, batch=(Phase(10),), mesh=Mesh(cpu_devices=2))
    return with_parts(config, schedule={"warmup_epochs": 0.4}, checkpoint={"every_epochs": 0.2, "keep": 9})


def longer(config, epochs):
    return dataclasses.replace(config, epochs=epochs)


def continued(config, workdir, **options):
    """Continue with a new schedule; the lines that the run shows."""
    screen = Recorder()
    train_shown(config, workdir, screen=screen, accept_changes=True, schedule_from_now=True, **options)
    return screen.lines


def rates(workdir):
    return {record["samples"]: record["learning_rate"] for record in read_records(workdir) if "loss" in record}


def by_optax(begin, end):
    """Samples after a step -> rate: warm-up of 20 images to 2, then the cosine to 0 at the end, counted from `begin`."""
    cosine = optax.warmup_cosine_decay_schedule(0.0, 2.0, warmup_steps=20, decay_steps=end - begin)
    return {samples + 10: float(cosine(samples - begin)) for samples in range(begin, end, 10)}


def test_schedule_of_the_added_epochs_is_that_of_optax_also_the_second_time(short, tmp_path):
    train_shown(short, tmp_path, screen=Screen(quiet=True))
    lines = continued(longer(short, 2.0), tmp_path)
    assert any("starts anew at epoch 1.00 and ends with the run at epoch 2;" in line for line in lines)
    continued(longer(short, 4.0), tmp_path)
    expected = by_optax(0, 50) | by_optax(50, 100) | by_optax(100, 200)
    assert rates(tmp_path) == pytest.approx(expected, abs=1e-6)
    assert run_config(tmp_path).schedule.from_epoch == 2.0
    assert train(longer(short, 4.0), tmp_path, accept_changes=True, schedule_from_now=True).samples == 200  # finished: shown
    recomputed = Recorder()
    train_shown(longer(short, 5.0), tmp_path, screen=recomputed, accept_changes=True)
    rate = 2 * (1 + np.cos(np.pi * (4 - 0.4) / (5 - 0.4))) / 2
    (line,) = (text for text in recomputed.lines if "holds from epoch 4.00 on" in text)
    assert f"changes learning rate 0 -> {rate:.4g}; --schedule-from-now" in line


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in its directory", "in another"])
def test_run_killed_in_the_new_warm_up_resumes_exactly_with_the_same_command(short, tmp_path, elsewhere):
    """On other devices the rates are the same."""
    train_shown(short, tmp_path / "first", screen=Screen(quiet=True))
    options = {"accept_changes": True, "schedule_from_now": True} | ({"resume": tmp_path / "first"} if elsewhere else {})
    config = longer(short, 2.0)
    for name in ("whole", "cut", "moved"):
        if not elsewhere:
            shutil.copytree(tmp_path / "first", tmp_path / name)
        if name != "whole":  # before and after the first checkpoint of the new schedule
            train_until(config, tmp_path / name, step=6, **options)
            train_until(config, tmp_path / name, step=8, **options)
        config = dataclasses.replace(config, mesh=Mesh(cpu_devices=1 if name == "moved" else 2))
        train_shown(config, tmp_path / name, screen=Screen(quiet=True), **options)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    assert rates(tmp_path / "moved") == rates(tmp_path / "whole")
    assert rates(tmp_path / "whole") == pytest.approx(by_optax(0, 50) | by_optax(50, 100), abs=1e-6)
    assert jaxdp.evaluate(None, tmp_path / "cut")["samples"] == 100
    with pytest.raises(ConfigError, match=r"it holds a different run \(schedule.from_epoch: 1 -> 0\); use"):
        train(longer(short, 2.0), tmp_path / "cut")


def test_another_rate_and_batch_begin_with_the_new_schedule(short, tmp_path):
    train_shown(short, tmp_path, screen=Screen(quiet=True))
    schedule = Schedule(name="polynomial", learning_rate=1.0, start=0.5, warmup_epochs=0.4, power=1.0)
    lines = continued(dataclasses.replace(short, epochs=2.0, batch=(Phase(25),), schedule=schedule), tmp_path)
    (line,) = (text for text in lines if "starts anew" in text)
    assert line.endswith("it changes learning rate 0 -> 0.5, batch 10 -> 25")
    assert [rate for samples, rate in rates(tmp_path).items() if samples > 50] == pytest.approx([0.5, 1 - 0.1 / 0.6])


def test_new_schedule_needs_a_checkpoint_and_accepted_changes(short, tmp_path):
    with pytest.raises(ConfigError, match=r"^--schedule-from-now=True: there is no checkpoint to continue from; omit it$"):
        continued(short, tmp_path)
    with pytest.raises(ConfigError, match=r"^schedule.from_epoch=0.5: the run begins at epoch 0,.*--schedule.from-epoch 0$"):
        train(with_parts(short, schedule={"from_epoch": 0.5}), tmp_path / "later")
    train_shown(short, tmp_path, screen=Screen(quiet=True))
    with pytest.raises(ConfigError, match=r"schedule.from_epoch: 0 -> 1.*, or --accept-changes .*, and --schedule-from-now to"):
        train(longer(short, 2.0), tmp_path, schedule_from_now=True)


def test_damaged_newest_checkpoint_begins_the_new_schedule_at_the_one_before(short, tmp_path):
    train_shown(short, tmp_path, screen=Screen(quiet=True))
    newest, older, *_ = checkpoint_paths(tmp_path / "checkpoints")
    damage(newest)
    continued(longer(short, 2.0), tmp_path)
    assert run_config(tmp_path).schedule.from_epoch == int(older.name) / 50 == 0.8
    assert rates(tmp_path)[50] == 0.0  # the first of the warm-up, 40 images seen
