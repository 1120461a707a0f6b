"""The recipes of 2021 and 2022, small: all of their parts in one run, interrupted, and on different meshes."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.images import encode, smooth_image
from helpers.runs import outcome, train_until

import jaxdp
from jaxdp.config import Mesh
from jaxdp.data import policies
from jaxdp.models import resnet
from jaxdp.recipes import load_config

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
    config, flags = load_config(request.param), ["--epochs", 3, "--schedule.warmup-epochs", 0.5, "--mesh.cpu-devices", 2]
    flags += ["--data.source", "folder", "--data.directory", str(tmp_path / "pictures"), "--guard.audit-every-steps", "None"]
    flags += ["--model.width", 4, "--model.classes", 4, "--model.dtype", "float32", "--logging.every-steps", 1]
    for name in ("image-size", "eval-size", "eval-resize"):
        if (value := getattr(config.data, name.replace("-", "_"))) and value > 1:
            flags += [f"--data.{name}", value // SHRINK]
    for number, phase in enumerate(config.batch):
        flags += [f"--batch.{number}.global-batch", BATCH, f"--batch.{number}.per-worker-batch", 8]
        flags += [f"--batch.{number}.image-size", phase.image_size // SHRINK] if phase.image_size else []
    monkeypatch.setattr(policies, "DRAWS", 1)  # two operations compile for a minute on a CPU
    return load_config(request.param, [*flags, "--logging.no-tensorboard"])


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
