"""Tests of the order in memory of convolution kernels, on CPU devices, which support it as GPUs do."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.step import (
    assert_close,
    assert_replicated,
    compiled_step,
    initial_params,
    make_batch,
    step_config,
)

from jaxdp import models, train
from jaxdp.config import Compile, Phase
from jaxdp.data import prefetch
from jaxdp.inference.load_run import load_run
from jaxdp.parallel.mesh import abstract_mesh, make_mesh
from jaxdp.training import run, state
from jaxdp.training.state import abstract_state, create_state, replicate, with_layout


def in_layout(config, layout):
    return dataclasses.replace(config, compile=Compile(conv_layout=layout))


def kernels_of(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim == 4]


def order_of(leaf):
    """The axes of an array from the outermost to the innermost."""
    return tuple(leaf.format.layout.major_to_minor)


@pytest.mark.parametrize(
    ("layout", "order"), [pytest.param("hwio", (0, 1, 2, 3), marks=pytest.mark.slow), ("ohwi", (3, 0, 1, 2))]
)
def test_a_step_keeps_the_layout_and_gives_the_same_state(layout, order):
    config, mesh = in_layout(step_config(), layout), make_mesh(2, 2)
    state = create_state(config, models.create(config.model), mesh)._replace(params=initial_params(config)[0])
    hyperparameters = {"learning_rate": np.float32(0.1), "momentum": np.float32(0.9), "seed": np.uint32(0)}
    batch = prefetch.to_global(make_batch(), mesh)
    default, _ = compiled_step(step_config(), (2, 2))(jax.tree.map(np.array, state), batch, hyperparameters)
    expected = jax.tree.map(np.asarray, default)
    state = replicate(config, state, mesh)
    step = compiled_step(config, (2, 2))
    state, _ = step(state, batch, hyperparameters)
    assert len(kernels_of(state)) >= 2 * len(kernels_of(state.params)) > 0  # the momentum too
    assert {order_of(leaf) for leaf in kernels_of(state)} == {order}
    assert_replicated(state)
    for name in ("params", "batch_stats", "opt_state"):
        assert_close(getattr(state, name), getattr(expected, name), 1e-5)


@pytest.mark.slow
def test_a_run_with_averages_and_phases_on_other_devices_ends_as_in_the_default_layout(tiny_resnet, tmp_path, monkeypatch):
    placed = []  # devices and orders of every placement

    def recorded(config, tree, mesh):
        found = replicate(config, tree, mesh)
        placed.append((mesh.size, {order_of(leaf) for leaf in kernels_of(found)}))
        return found

    for module in (state, run):
        monkeypatch.setattr(module, "replicate", recorded)
    config = dataclasses.replace(
        tiny_resnet,
        optimizer=dataclasses.replace(tiny_resnet.optimizer, average_decay=0.9),
        batch=(Phase(global_batch=8, per_worker_batch=4, until_epoch=1.5), Phase(global_batch=16, per_worker_batch=4)),
    )
    default = train(config, tmp_path / "default")
    assert all(orders == {(0, 1, 2, 3)} for _, orders in placed)
    placed.clear()
    other = train(in_layout(config, "ohwi"), tmp_path / "other")
    assert {devices for devices, _ in placed} == {2, 4}
    assert all(orders == {(3, 0, 1, 2)} for _, orders in placed)
    assert other.loss == pytest.approx(default.loss, rel=1e-4)
    ours, expected = (load_run(tmp_path / name).state for name in ("other", "default"))
    assert_close(ours.params, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), expected.params), 1e-4)


@pytest.mark.slow
def test_a_run_resumes_in_the_other_layout(tiny_resnet, tmp_path, capsys):
    train(dataclasses.replace(tiny_resnet, epochs=2.0), tmp_path)
    capsys.readouterr()
    train(dataclasses.replace(in_layout(tiny_resnet, "ohwi"), epochs=3.0), tmp_path, accept_changes=True)
    assert "resuming from" in capsys.readouterr().out


def test_without_devices_there_is_no_layout():
    config, mesh = in_layout(step_config(), "ohwi"), abstract_mesh(2, 2)
    state = abstract_state(config, models.create(config.model), mesh)
    assert all(leaf.format.layout is None for leaf in kernels_of(with_layout(config, state, mesh)))


TWO_PROCESSES = """
import dataclasses, sys
import numpy as np
from helpers.step import BATCH, PER_WORKER, compiled_step, initial_params, make_batch, step_config
from jaxdp import models
from jaxdp.config import Compile
from jaxdp.data import prefetch
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.state import create_state, replicate
mesh = make_mesh(2, 4)
for layout in ("hwio", "ohwi"):
    config = dataclasses.replace(step_config(), compile=Compile(conv_layout=layout))
    state = replicate(config, create_state(config, models.create(config.model), mesh), mesh)
    half = slice(rank * BATCH // processes, (rank + 1) * BATCH // processes)
    batch = prefetch.to_global({name: rows[half] for name, rows in make_batch().items()}, mesh)
    hyperparameters = {"learning_rate": np.float32(0.1), "momentum": np.float32(0.9), "seed": np.uint32(0)}
    state, metrics = compiled_step(config, (2, 4))(state, batch, hyperparameters)
    kernel = next(leaf for leaf in jax.tree.leaves(state.params) if leaf.ndim == 4)
    print(tuple(kernel.format.layout.major_to_minor), float(metrics["gradient_norm"].addressable_data(0)))
"""


@pytest.mark.slow
def test_two_processes_place_and_keep_the_layout(over_processes):
    for printed in over_processes(TWO_PROCESSES, 2):
        default, ours = (line.rsplit(" ", 1) for line in printed if line.startswith("("))
        assert (default[0], ours[0]) == ("(0, 1, 2, 3)", "(3, 0, 1, 2)")
        assert float(ours[1]) == pytest.approx(float(default[1]), rel=1e-5)
