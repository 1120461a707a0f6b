"""Summary of a plan as a table and as JSON."""

import dataclasses
import re

import jax
import pytest

from jaxdp import first_gradient, models
from jaxdp.choices import OPTIMIZERS
from jaxdp.config import Finetune, Optimizer
from jaxdp.loggers.plan_table import as_dict, summary_table
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import make_plan
from jaxdp.recipes import load_config
from jaxdp.sizes import model_summary
from jaxdp.training.state import create_state


def rows(plan, **parts) -> dict[str, str]:
    """Label -> fact in the table of a plan."""
    table = summary_table(plan, "4 devices", model_summary(plan.config), **parts)
    return dict(zip(*(column.cells for column in table.columns), strict=True))


def test_as_dict_has_phases_rates_model_and_gradient_bytes():
    config = load_config("digits")
    printed = as_dict(make_plan(config, examples=1437, devices=4), model_summary(config))
    assert printed["total_steps"] == sum(phase["steps"] for phase in printed["phases"])
    assert printed["gradient_bytes"] == 4 * printed["model"]["parameters"]
    rates = dict(printed["learning_rate"])
    assert max(rates.values()) <= config.schedule.learning_rate
    assert rates[0.0] == config.schedule.start


def test_model_summary_with_a_16_bit_wire_has_half_the_gradient_bytes():
    config = load_config("digits", ["--reduce.wire-dtype", "bfloat16", "--model.depth", "18"])
    assert model_summary(config)["gradient_bytes"] == 2 * model_summary(config)["parameters"]


def test_table_says_how_many_epochs_whole_steps_make():
    config = load_config("digits", ["--epochs", "2", "--model.depth", "18"])
    run = {examples: rows(make_plan(config, examples=examples, devices=4))["run"] for examples in (150, 1437)}
    assert "2 epochs (whole steps make it 2." in run[150]
    assert "2 epochs, " in run[1437]


def test_plan_names_the_metrics_of_its_task_that_are_gathered():
    config = load_config("digits", ["--model.depth", "18"])
    labels = dataclasses.replace(config, task="labels", optimizer=dataclasses.replace(config.optimizer, loss="binary"))
    shown, of_labels = (rows(make_plan(each, examples=1437, devices=4)) for each in (config, labels))
    assert "metrics" not in shown
    gathered = "mean average precision, F1 micro, F1 macro: 84 bytes for each held-out image on every host"
    assert of_labels["metrics"] == gathered  # logits and labels of ten classes, and a weight


@pytest.mark.parametrize(("name", "average_decay"), [*((name, None) for name in OPTIMIZERS), ("sgd", 0.9)])
def test_state_bytes_equal_those_of_the_arrays_on_a_device(name, average_decay, tiny_resnet):
    optimizer = Optimizer(name=name, average_decay=average_decay)
    config = dataclasses.replace(tiny_resnet, optimizer=optimizer, finetune=Finetune(weights="any", frozen_stages=1))
    state = create_state(config, models.create(config.model), make_mesh(2, 2))
    parts = {"parameters": state.params, "batch_statistics": state.batch_stats, "optimizer": state.opt_state}
    parts |= {} if average_decay is None else {"averages": state.average}
    held = {name: sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(tree)) for name, tree in parts.items()}
    state_bytes = model_summary(config)["state_bytes"]
    assert {part: size for part, size in state_bytes.items() if part != "gradients"} == held
    assert state_bytes["gradients"] < state_bytes["parameters"]


def test_gradient_bytes_of_the_state_equal_those_of_the_first_gradient(tiny):
    gradient = first_gradient(tiny)
    assert model_summary(tiny)["state_bytes"]["gradients"] == sum(leaf.nbytes for leaf in jax.tree.leaves(gradient))


def test_plan_of_lars_for_every_tensor_says_that_all_decay():
    flags = ["--model.depth", "18", "--model.width", "8", "--optimizer.adapt"]
    shown = {}
    for adapt in ("weights", "all"):
        config = load_config("digits", [*flags, adapt])
        shown[adapt] = rows(make_plan(config, examples=1437, devices=4))
        assert f"lars, adapt {adapt}, " in shown[adapt]["optimizer"]
    sizes = [re.findall(r"[\d,]+", row["weight decay"].replace(",", "")) for row in shown.values()]
    (matrices, in_matrices, vectors, in_vectors), everything = ([int(size) for size in one] for one in sizes)
    assert everything == [matrices + vectors, in_matrices + in_vectors, 0, 0]
    assert matrices == 21  # convolutions and the classifier
    assert vectors > 40
