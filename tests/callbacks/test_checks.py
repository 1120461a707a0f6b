import dataclasses
import math
import re

import numpy as np
import pytest
from helpers.runs import read_records
from helpers.step import with_parts

import jaxdp
from jaxdp.callbacks import checks
from jaxdp.callbacks.checks import LossWatch, chance_level_warning, check_step
from jaxdp.checkpoint.listing import checkpoint_paths
from jaxdp.config import Checkpoint, Phase
from jaxdp.errors import TrainingError
from jaxdp.planning import make_plan, small_worker_warning
from jaxdp.recipes import load_config


def record(step, loss):
    return {"step": step, "samples": 8 * step, "global_batch": 8, "learning_rate": 0.1, "loss": loss, "gradient_norm": 1.0}


def test_loss_watch_reports_an_explosion_once_with_the_last_good_position():
    watch = LossWatch(math.log(10))
    limit = 4 * np.log(10)
    losses = [2.0] * 30 + [1e9] + [2.0] * 25 + [limit + 1] * 30
    found = [(step, watch.last_good_samples(record(step, loss))) for step, loss in enumerate(losses, 1)]
    found = [(step, samples) for step, samples in found if samples is not None]
    assert found == [(31, 8 * 11)]  # of the twenty steps up to 31 the first began at 88 samples
    calm = LossWatch(math.log(10))
    assert not any(calm.last_good_samples(record(step, limit * 0.99)) for step in range(1, 100))
    assert "the loss has exploded: 20 steps up to step 5 (samples 40, learning rate 0.1)" in calm.warning(record(5, 40.0), "x")


def test_the_newest_checkpoint_from_before_an_explosion_is_never_removed(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(LossWatch, "last_good_samples", lambda _, record: 1000 if record["step"] == 9 else None)
    jaxdp.train(dataclasses.replace(tiny, checkpoint=Checkpoint(every_epochs=0.5, keep=1)), tmp_path)
    _newest, _best, retained = checkpoint_paths(tmp_path / "checkpoints")
    assert int(retained.name) <= 72
    assert f"the last checkpoint before that, {retained}, is kept" in capsys.readouterr().out


def test_train_skipping_more_steps_than_allowed_raises(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "MOST_SKIPPED_STEPS", 2)
    config = with_parts(tiny, guard={"non_finite": "skip"}, optimizer={"name": "sgd"}, schedule={"learning_rate": 1e15})
    with pytest.raises(TrainingError, match=r"3 steps with non-finite gradients were skipped, .* more than 2: "):
        jaxdp.train(config, tmp_path)
    lines = read_records(tmp_path)
    assert [line["skipped_steps"] for line in lines if "loss" in line][-2:] == [1, 2]
    check_step(record(3, float("nan")) | {"skipped_steps": 2}, config)


def test_chance_level_warning_compares_the_loss_with_chance_level():
    assert chance_level_warning(1.09, epoch=2, chance=math.log(3)) is None
    assert "loss 7.300 exceeds chance level, 1.099" in chance_level_warning(7.3, epoch=2, chance=math.log(3))


def test_small_worker_warning_of_eight_images_names_the_flag():
    def warning(**fields):
        config = dataclasses.replace(load_config("digits"), batch=(Phase(**fields),))
        return small_worker_warning(make_plan(config, examples=100, devices=4), has_batch_norm=True)

    assert re.search(r"workers of 8 images each, .* set a larger --batch\.0\.per-worker", warning(global_batch=32))
    assert warning(global_batch=36) is None
    assert warning(global_batch=32, per_worker_batch=8, image_size=33) is None
