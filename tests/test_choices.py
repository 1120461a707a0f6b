"""The tables of choices agree with the config, the implementations and the documentation."""

import re
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import jaxdp.config
from jaxdp.choices import (
    AUGMENTATIONS,
    AUTO_AUGMENTS,
    LOSSES,
    MIXES,
    MODELS,
    OPTIMIZERS,
    SOURCES,
    UpdateRule,
)
from jaxdp.config import Optimizer
from jaxdp.optim import optimizer
from jaxdp.recipes import load_config
from jaxdp.registry import Choices
from jaxdp.schedules import SCHEDULES
from jaxdp.strategies import STRATEGIES
from jaxdp.validation import TABLES

EXTENDING_PAGE = (Path(__file__).parent.parent / "docs/extending.md").read_text()
IMPLEMENTED = (OPTIMIZERS, LOSSES, SCHEDULES, STRATEGIES, AUGMENTATIONS, AUTO_AUGMENTS, MIXES, MODELS, SOURCES)


@pytest.mark.parametrize("table", IMPLEMENTED, ids=lambda table: table.field)
def test_entries_name_implementations_that_exist(table):
    for name in table.builtin:
        assert (table.implementation(name) is None) == (name == "none"), name


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.field)
def test_flag_with_the_name_of_a_choice_selects_it(table):
    name = [*table][-1]
    flags = ["--data.directory", "/images"] if getattr(table[name], "layout", "") else []
    config = load_config("digits", [f"--{table.field.replace('_', '-')}", name, *flags])
    section, field = table.field.split(".")
    assert getattr(getattr(config, section), field) == name


def test_lion_of_the_guide_equals_optax():
    """The entry, the field and the constructor, executed from docs/extending.md, with the constants of optax."""
    section = EXTENDING_PAGE.partition("### Add an optimizer")[2]
    constructor, record = map(textwrap.dedent, re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:2])
    (entry,) = re.findall(r'`("lion": UpdateRule.*?)`', section)
    table = Choices("optimizer.name", eval(f"{{{entry}}}", {"UpdateRule": UpdateRule}))
    functions = vars(optimizer) | vars(jaxdp.config)
    exec(record + constructor, functions)
    table.read("optimizer", lion=functions["Lion"])
    config = functions["Lion"](weight_decay=0.1)
    ours, peer = functions["lion"](config, 0.1, 0.9), optax.lion(0.1, b1=0.9, weight_decay=0.1)
    weights = jnp.array([[1.0, -2.0]])
    our_state, peer_state = ours.init(weights), peer.init(weights)
    for gradient in ([0.3, 0.5], [-1.0, 0.2], [0.1, 4.0]):
        updates, our_state = ours.update(jnp.array([gradient]), our_state, weights)
        expected, peer_state = peer.update(jnp.array([gradient]), peer_state, weights)
        np.testing.assert_allclose(updates, expected, rtol=1e-6)


def final_update(name: str, weights: float, *, gradients: tuple[float, ...], scale: float = 1.0) -> float:
    """Size of the last update by an optimizer without weight decay."""
    config = Optimizer(name=name, weight_decay=0.0, eps=0.0)
    rule, params = OPTIMIZERS.implementation(name)(config, 0.1, 0.9), {"w": jnp.full((2, 2), weights)}
    state = rule.init(params)
    for gradient in gradients:
        updates, state = rule.update({"w": jnp.full((2, 2), scale * gradient)}, state, params)
    return float(jnp.abs(updates["w"][0, 0]))


@pytest.mark.parametrize("name", OPTIMIZERS.builtin)
def test_properties_of_an_optimizer_are_those_of_its_updates(name):
    rule, steady = OPTIMIZERS[name], (1.0,) * 100
    first, last = final_update(name, 1.0, gradients=steady[:1]), final_update(name, 1.0, gradients=steady)
    assert (last > 9 * first) == rule.accumulates  # the gradients of 1 / (1 - 0.9) steps
    differs = final_update(name, 2.0, gradients=steady) != pytest.approx(last, rel=1e-3)
    assert differs == rule.uses_weight_norms


def test_sources_have_the_numbers_that_are_published_or_computed():
    pixels = load_digits().images * 255 / 16
    assert SOURCES["digits"].mean == pytest.approx(pixels.mean(), abs=1.0)
    assert SOURCES["digits"].std == pytest.approx(pixels.std(), abs=10.0)
    for name in ("folder", "cifar10", "imagenet2012"):  # torchvision's
        np.testing.assert_allclose(SOURCES[name].mean, np.array([0.485, 0.456, 0.406]) * 255, rtol=1e-6)
        np.testing.assert_allclose(SOURCES[name].std, np.array([0.229, 0.224, 0.225]) * 255, rtol=1e-6)
    assert {name: (each.classes, each.train_images) for name, each in SOURCES.items() if each.classes} == {
        "digits": (10, None),
        "imagenet2012": (1000, 1_281_167),
        "cifar10": (10, 50_000),
    }
