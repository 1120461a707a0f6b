"""The tables of choices agree with the config, the implementations and the documentation."""

import re
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp.config
from jaxdp.choices import AUGMENTATIONS, AUTO_AUGMENTS, LOSSES, MIXES, MODELS, OPTIMIZERS, SOURCES, UpdateRule
from jaxdp.config import Adam
from jaxdp.optim import optimizer
from jaxdp.recipes import load_config
from jaxdp.registry import Choice, Choices
from jaxdp.schedules import SCHEDULES
from jaxdp.strategies import STRATEGIES
from jaxdp.validation import TABLES

EXTENDING_PAGE = (Path(__file__).parent.parent / "docs/extending.md").read_text()
IMPLEMENTED = (OPTIMIZERS, LOSSES, SCHEDULES, STRATEGIES, AUGMENTATIONS, AUTO_AUGMENTS, MIXES, MODELS, SOURCES)


def test_fields_of_an_optimizer_are_read_or_ignored():
    assert "optimizer.nesterov" in OPTIMIZERS.read_fields("sgd")
    assert "optimizer.beta2" in OPTIMIZERS.ignored_fields("lars")
    assert OPTIMIZERS.ignored_fields("registered_by_a_user") == []
    assert SOURCES.ignored_fields("imagenette/320px") == [
        "data.eval_examples",
        "data.image_column",
        "data.label_column",
        "data.train_examples",
    ]


@pytest.mark.parametrize("table", IMPLEMENTED, ids=lambda table: table.field)
def test_entries_name_implementations_that_exist(table):
    for name in table.builtin:
        assert (table.implementation(name) is None) == (name == "none"), name


def test_choice_reads_the_fields_of_the_one_that_it_is_like():
    assert OPTIMIZERS.read_fields("lamb") == OPTIMIZERS.read_fields("adamw") != OPTIMIZERS.read_fields("sgd")
    with pytest.raises(TypeError, match=r"optimizer\.name has no adma"):
        Choices("optimizer.name", {"adam": Choice(""), "nadam": Choice("", like="adma")}).read("optimizer", adam=Adam)
    with pytest.raises(TypeError, match=r"optimizer\.name has no adma"):
        Choices("optimizer.name", {"adam": Choice("")}).read("optimizer", adma=Adam)


CHOICES = [(table, name) for table in TABLES for name in table if (table, name) != (SOURCES, "imagenet2012")]


@pytest.mark.parametrize(("table", "name"), CHOICES, ids=lambda part: getattr(part, "field", part))
def test_flag_with_the_name_of_a_choice_selects_it(table, name):
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
