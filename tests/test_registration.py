"""Augmentations that users register, with the example of docs/extending.md against SciPy and Pillow's formulas."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

import jaxdp
from jaxdp.config import Augment, Config, Data
from jaxdp.data import policies
from jaxdp.data.augment import image_keys
from jaxdp.errors import ConfigError
from jaxdp.registration import check_augmentation

PAGE = (Path(__file__).parents[1] / "docs/extending.md").read_text()
CONFIG = Config(seed=3, data=Data(source="synthetic", image_size=24, auto_augment="mine"))
POSITIONS = np.arange(7, 47, dtype=np.uint32)


@functools.partial(jax.jit, static_argnums=0)
def changed(config, images, positions):
    return policies.change_pixels(config, images, positions, mean=127.5)


def random_images():
    return np.random.default_rng(0).integers(0, 256, (len(POSITIONS), 24, 24, 3)).astype(np.uint8)


@pytest.mark.slow
def test_example_of_the_page_is_three_augment():
    """Each result is one of the three published operations; all occur."""
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "three_augment" in block]
    names = {}
    exec(block, names)
    config, images = dataclasses.replace(CONFIG, data=names["config"].data), random_images()
    found = np.asarray(changed(config, images, POSITIONS))
    keys = image_keys(config.seed, POSITIONS, policies.POLICY_KEY)
    seen = set()
    for image, result, key in zip(images.astype(np.float64), found, keys, strict=True):
        sigma = float(jax.random.uniform(jax.random.split(key)[1], minval=0.1, maxval=2.0))
        expected = {
            "gray": np.repeat(image @ [[0.299], [0.587], [0.114]], 3, axis=-1),
            "solarize": np.where(image < 128, image, 255 - image),
            "blur": gaussian_filter(image, (sigma, sigma, 0), mode="nearest", radius=(8, 8, 0)),
        }
        (name,) = [name for name, value in expected.items() if np.abs(result - value).max() < 1e-3]
        seen.add(name)
    assert len(seen) == 3


@pytest.mark.parametrize("images", [random_images(), random_images().astype(np.float32)], ids=["uint8", "float32"])
def test_function_sees_one_image_and_a_key_of_its_position(images):
    jaxdp.register_augmentation("mine", lambda image, key: image + jax.random.uniform(key) * jnp.ones_like(image))
    whole, order = np.asarray(changed(CONFIG, images, POSITIONS)), np.random.default_rng(1).permutation(len(POSITIONS))
    np.testing.assert_array_equal(whole[order], changed(CONFIG, images[order], POSITIONS[order]))
    shifts = (whole - images.astype(np.float64)).reshape(len(images), -1) / 255
    assert np.ptp(shifts, axis=1).max() < 1e-6
    assert len(np.unique(shifts[:, 0].round(5))) == len(images)
    assert 0.3 < shifts.mean() < 0.7


def test_color_jitter_follows_on_whole_values():
    jaxdp.register_augmentation("mine", lambda image, key: 1 - image)
    config = dataclasses.replace(CONFIG, augment=Augment(color_jitter=(1e-6,)))
    found = np.asarray(changed(config, random_images(), POSITIONS))
    assert found.dtype == np.uint8
    assert np.abs(found.astype(int) - (255 - random_images().astype(int))).max() <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda image, key: image[:8],
            r"the registered function returned float32 \(8, 24, 3\); must be float32 \(24, 24, 3\), as",
        ),
        (lambda image: image, r"the registered function failed: TypeError: .*; it takes \(image \[S, S, 3\] float32, key\)"),
    ],
)
def test_a_wrong_function_is_refused_before_the_run(change, message):
    jaxdp.register_augmentation("mine", change)
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, depth=18, classes=10))
    with pytest.raises(ConfigError, match=f"^data.auto_augment='mine': {message}") as refused:
        check_augmentation(config)
    assert "\n" not in str(refused.value)
