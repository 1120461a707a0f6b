"""The recipes of 2021 and 2022, small: all of their parts in one run, interrupted, and on different meshes."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.images import encode, smooth_image
from helpers.runs import outcome, train_until

import jaxdp
from jaxdp.config import Logging, Mesh
from jaxdp.data import policies
from jaxdp.models import resnet
from jaxdp.recipes import load_config
from jaxdp.validation import validate

pytestmark = pytest.mark.slow
BATCH, IMAGES, SHRINK = 16, 64, 8


@pytest.fixture
def small(tmp_path, monkeypatch, request):
    """A recipe on 64 pictures of four classes, with two blocks, batches of 16, images an eighth as large, and three epochs."""
    monkeypatch.setitem(resnet.BLOCKS, 50, resnet.BLOCKS[resnet.TWO_BLOCKS])
    for split, count in (("train", IMAGES), ("val", 12)):
        for number in range(count):
            folder = tmp_path / "pictures" / split / str(number % 4)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.jpg").write_bytes(encode(smooth_image(40 + number % 7, 50 - number % 5, seed=number)))
    config = load_config(request.param)
    sizes = {
        name: value // SHRINK
        for name in ("image_size", "eval_size", "eval_resize")
        if (value := getattr(config.data, name)) and value > 1
    }
    data = dataclasses.replace(config.data, source="folder", directory=str(tmp_path / "pictures"), **sizes)
    shorten = 3.0 / config.epochs
    batch = tuple(
        dataclasses.replace(
            phase,
            global_batch=BATCH,
            per_worker_batch=8,
            until_epoch=phase.until_epoch and phase.until_epoch * shorten,
            image_size=phase.image_size and phase.image_size // SHRINK,
        )
        for phase in config.batch
    )
    monkeypatch.setattr(policies, "DRAWS", 1)  # two operations compile for a minute on a CPU
    return validate(
        dataclasses.replace(
            config,
            epochs=3.0,
            data=data,
            batch=batch,
            model=dataclasses.replace(config.model, width=4, classes=4, dtype="float32"),
            schedule=dataclasses.replace(config.schedule, warmup_epochs=0.5),
            mesh=Mesh(cpu_devices=2),
            guard=dataclasses.replace(config.guard, audit_every_steps=None),
            logging=Logging(every_steps=1, tensorboard=False),
        )
    )


@pytest.mark.parametrize("small", ["imagenet_rsb_a1", "imagenet_ffcv_16"], indirect=True)
def test_interrupted_recipe_equals_an_uninterrupted_one(small, tmp_path):
    jaxdp.train(small, tmp_path / "whole")
    train_until(small, tmp_path / "cut", step=7)
    jaxdp.train(small, tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    assert all(np.isfinite(record["loss"]) for record in outcome(tmp_path / "cut")[0] if "loss" in record)


@pytest.mark.parametrize("small", ["imagenet_torchvision_v2", "imagenet_mosaic_mild"], indirect=True)
def test_gradient_of_a_recipe_is_the_same_on_one_and_two_devices(small):
    one, two = (jaxdp.first_gradient(dataclasses.replace(small, mesh=Mesh(1, count, cpu_devices=count))) for count in (1, 2))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(np.abs(a).max(), 1e-3))
