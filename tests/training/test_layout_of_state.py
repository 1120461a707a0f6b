"""The sharded update: the same run as with the replicated one, in shards of the state."""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.runs import outcome, outcome_of_whole_run, train_until
from helpers.step import BATCH, PIXELS, assert_close, hyperparameters, make_batch, step_config, with_parts

import jaxdp
from jaxdp import models, register_model, train
from jaxdp.checkpoint.listing import latest_valid
from jaxdp.config import Finetune, Group, Mesh, Model, Optimizer, Phase, Reduce
from jaxdp.data import prefetch
from jaxdp.errors import ConfigError
from jaxdp.inference.load_run import load_run
from jaxdp.optim import loss_scale
from jaxdp.parallel.allreduce import stages_of
from jaxdp.parallel.mesh import HORIZONTAL, abstract_mesh, make_mesh
from jaxdp.parallel.shards import shard_shape
from jaxdp.parallel.traffic import find_collectives
from jaxdp.planning import make_plan
from jaxdp.sizes import model_summary
from jaxdp.training.state import abstract_state, create_state
from jaxdp.training.step import make_layout, make_train_step
from jaxdp.training.step_compiler import trace_train_step

RATES = {"lars": 0.5, "sgd": 0.01, "adamw": 0.01, "lamb": 0.01, "my_rule": 0.01}


def sharded(config):
    return with_parts(config, reduce={"update": "sharded"})


@functools.cache
def ten_steps(config, mesh_shape, accumulation=1, steps=10):
    """(the whole state, metrics of every step) on the host; the scales of all blocks differ from zero."""
    mesh, model = make_mesh(*mesh_shape), models.create(config.model)
    layout = make_layout(config, model, mesh)
    state = create_state(config, model, mesh)
    state = layout.place(state._replace(params=jax.tree.map(lambda p: p + 0.05, state.params)))
    step = make_train_step(config, model, mesh, pixel_stats=PIXELS, accumulation=accumulation)
    batch, metrics = prefetch.to_global(make_batch(), mesh), []
    for _ in range(steps):
        state, values = step(state, batch, hyperparameters(RATES[config.optimizer.name]))
        metrics.append({name: float(value) for name, value in values.items()})
    return jax.device_get(layout.gather_state(state)), metrics


def relative_difference(ours, expected):
    difference = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, ours, expected)
    return float(optax.tree.norm(difference) / optax.tree.norm(jax.tree.map(np.float64, expected)))


UPDATES = {
    "lars": {},
    "lars, clipped": {"optimizer": {"clip_norm": 0.1}},
    "sgd": {"optimizer": {"name": "sgd"}},
    "sgd, Nesterov": {"optimizer": {"name": "sgd", "nesterov": True}},
    "adamw": {"optimizer": {"name": "adamw"}},
    "lamb, clipped": {"optimizer": {"name": "lamb", "clip_norm": 0.1}},
    "averaged": {"optimizer": {"average_decay": 0.9, "average_start": "warmup"}},
    "small buckets": {"reduce": {"bucket_bytes": 400}},
    "without overlap": {"reduce": {"overlap": False}},
    "16 bits on the wire": {"reduce": {"wire_dtype": "bfloat16"}},
    "frozen stem, groups": {
        "optimizer": {"groups": (Group("fc", rate=3.0), Group("bn.*bias", decay=0.5), Group("layer2", 0.5, 0.0))},
        "finetune": {"weights": "any", "frozen_stages": 1, "layer_decay": 0.75},
    },
    "synchronized": {"model": {"norm": "synchronized"}},
    "folded, recomputed": {"model": {"batch_norm": "folded", "remat": True}},
}
# Of a ResNet on a 2x4 mesh.
RESNET = {
    "lamb, clipped": "float32",
    "frozen stem, groups": "bfloat16",
    "16 bits on the wire": "bfloat16",
    "folded, recomputed": "bfloat16",
    "small buckets": "float32",
}
# In float32, for Adam divides by the root of the second moment: a flipped rounding of a tiny gradient in 16 bits changes its
# whole update.
ON_SMALL_NET = [name for name in UPDATES if name not in RESNET]


class SmallNet(nn.Module):
    """A convolution, batch normalization and a classifier, with sizes that no axis divides; its programs compile quickly."""

    classes: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(5, (3, 3), dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(x))
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


@pytest.fixture
def small_net():
    register_model("small_net", SmallNet)


def on_every_mesh():
    """LARS, which adds norms over the parts, on meshes with one and eight parts, and the other updates on 2x4."""
    for name in ON_SMALL_NET:
        shapes = [(1, 8), (8, 1)] if name == "lars" else [(2, 4)]
        for shape in shapes:
            yield pytest.param(name, shape, "float32", marks=[] if name == "lars, clipped" else pytest.mark.slow)
    yield pytest.param("lars", (2, 4), "bfloat16", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "mesh_shape", "dtype"), [*on_every_mesh()])
def test_ten_steps_on_every_mesh_equal_those_with_a_replicated_update(small_net, name, mesh_shape, dtype):
    config = dataclasses.replace(step_config(), model=Model(name="small_net", classes=7, dtype=dtype))
    assert_equal_steps(with_parts(config, **UPDATES[name]), mesh_shape)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), RESNET.items())
def test_ten_steps_of_a_resnet_equal_those_with_a_replicated_update(name, dtype):
    model = {"dtype": dtype, **UPDATES[name].get("model", {})}
    assert_equal_steps(with_parts(with_parts(step_config(), **UPDATES[name]), model=model), (2, 4))


def assert_equal_steps(config, mesh_shape):
    dtype = config.model.dtype
    config = dataclasses.replace(config, batch=(Phase(global_batch=BATCH, per_worker_batch=BATCH // 8),))
    expected, expected_metrics = ten_steps(config, mesh_shape)
    state, metrics = ten_steps(sharded(config), mesh_shape)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    assert relative_difference(state.params, expected.params) < 1e-6
    assert relative_difference(state.opt_state, expected.opt_state) < 1e-5
    if config.optimizer.average_decay:
        assert relative_difference(state.average, expected.average) < 1e-6
    for ours, theirs in zip(metrics, expected_metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3 if dtype == "bfloat16" else 1e-5)


def on_small_net(**parts):
    return with_parts(step_config(), model={"name": "small_net"}, **parts)


@pytest.mark.slow
def test_skipped_step_of_a_sharded_update_leaves_the_state_and_halves_the_scale(small_net, monkeypatch):
    """float16 gradients overflow at the first scales: these steps are skipped on all devices, the later ones are equal."""
    config = with_parts(step_config(), model={"name": "small_net", "dtype": "float16"}, reduce={"wire_dtype": "float16"})
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**22)
    config = with_parts(config, optimizer={"loss_scale": "dynamic"})
    expected, expected_metrics = ten_steps(config, (2, 4), 2)
    state, metrics = ten_steps(sharded(config), (2, 4), 2)
    skipped = [int(values["skipped_steps"]) for values in metrics]
    assert skipped == [int(values["skipped_steps"]) for values in expected_metrics]
    assert 0 < skipped[-1] < 10
    assert state.loss_scale == expected.loss_scale
    assert relative_difference(state.params, expected.params) < 1e-6


@pytest.mark.parametrize("adapt", ["weights", pytest.param("all", marks=pytest.mark.slow)])
def test_lars_step_on_shards_equals_float64(small_net, adapt):
    """One step of two micro-batches, computed by NumPy: the mean gradient follows from a replicated step of plain SGD."""
    config = dataclasses.replace(on_small_net(), optimizer=Optimizer(name="sgd", weight_decay=0.0, label_smoothing=0.1))
    mesh, model = make_mesh(2, 4), models.create(config.model)
    start = jax.tree.map(lambda p: np.float64(p) + 0.05, jax.device_get(create_state(config, model, mesh).params))
    gradient = jax.tree.map(np.float64, optax.tree.get(ten_steps(config, (2, 4), 2, steps=1)[0].opt_state, "trace"))
    lars = dataclasses.replace(config, optimizer=Optimizer(weight_decay=1e-2, label_smoothing=0.1, adapt=adapt))
    state, _ = ten_steps(sharded(lars), (2, 4), 2, steps=1)

    def updated(w, g):
        if w.ndim > 1 or adapt == "all":
            ratio = 1e-3 * np.linalg.norm(w) / (np.linalg.norm(g) + 1e-2 * np.linalg.norm(w) + 1e-6)
            g = ratio * (g + 1e-2 * w)
        return w - RATES["lars"] * g

    assert_close(state.params, jax.tree.map(updated, start, gradient), 1e-6)


def state_of(config, mesh):
    model = models.create(config.model)
    layout = make_layout(config, model, mesh)
    return layout, create_state(config, model, mesh)


@pytest.mark.parametrize("mesh_shape", [(2, 4), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((1, 8), (8, 1)))])
def test_placed_state_is_in_shards_and_gathers_to_the_same_bits(small_net, mesh_shape):
    config = sharded(on_small_net(optimizer={"average_decay": 0.9}))
    mesh = make_mesh(*mesh_shape)
    layout, whole = state_of(config, mesh)
    placed = layout.place(whole)
    for leaf, expected in zip(jax.tree.leaves(placed), jax.tree.leaves(layout.abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
        assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
    parts = mesh_shape[1]
    for leaf, tensor in zip(jax.tree.leaves(placed.params), jax.tree.leaves(whole.params), strict=True):
        assert leaf.addressable_shards[0].data.shape == shard_shape(tensor.shape, parts)
        assert leaf.ndim == tensor.ndim
    jax.tree.map(np.testing.assert_array_equal, layout.gather_state(placed), whole)
    jax.tree.map(np.testing.assert_array_equal, layout.eval_variables(placed), whole.eval_variables)


def collectives(config, mesh_shape=(2, 4)):
    devices = math.prod(mesh_shape)
    config = dataclasses.replace(config, batch=(Phase(global_batch=BATCH, per_worker_batch=BATCH // devices),))
    config = dataclasses.replace(config, mesh=Mesh(vertical=mesh_shape[0], horizontal=mesh_shape[1]))
    phase = make_plan(config, examples=100, devices=devices).phases[0]
    mesh = abstract_mesh(*mesh_shape)
    traced = trace_train_step(config, models.create(config.model), phase, mesh=mesh)
    return find_collectives(traced.jaxpr, dict(mesh.shape))


@pytest.mark.parametrize(
    ("optimizer", "calls"),
    [
        ({}, 1),
        ({"name": "lamb"}, 2),
        *(pytest.param(one, 1, marks=pytest.mark.slow) for one in ({"name": "sgd"}, {"clip_norm": 1.0})),
    ],
)
def test_norms_of_all_tensors_are_one_message_along_the_rows(optimizer, calls):
    config = sharded(with_parts(step_config(), optimizer=optimizer))
    along_rows = [one for one in collectives(config) if one.operation == "all-reduce" and one.axes == (HORIZONTAL,)]
    tensors = len(jax.tree.leaves(abstract_state(config, models.create(config.model), abstract_mesh(2, 4)).params))
    assert sum(one.count for one in along_rows) == calls
    assert along_rows[0].dtype == "float32"
    assert along_rows[0].operand_bytes == 4 * tensors * (1 if optimizer.get("name") == "sgd" else 2)


# Whole runs


@pytest.fixture
def run(tiny):
    return sharded(dataclasses.replace(tiny, reduce=Reduce(), optimizer=Optimizer(label_smoothing=0.1, average_decay=0.9)))


def last_params(workdir):
    return jax.tree.map(np.asarray, load_run(workdir)[0].params)


def test_run_with_a_sharded_update_equals_the_replicated_run_and_its_checkpoint_has_the_same_arrays(run, tmp_path):
    train(run, tmp_path / "sharded")
    train(dataclasses.replace(run, reduce=Reduce()), tmp_path / "whole")
    assert relative_difference(last_params(tmp_path / "sharded"), last_params(tmp_path / "whole")) < 1e-6
    described = [
        {name: facts[:2] for name, facts in latest_valid(tmp_path / name / "checkpoints").arrays.items()}
        for name in ("sharded", "whole")
    ]
    assert described[0] == described[1]


def test_resume_of_a_sharded_run_equals_an_uninterrupted_run(run, tmp_path):
    for cut in ({"step": 3}, {"evaluated": 56}, {"step": 11}):
        train_until(run, tmp_path, **cut)
    train(run, tmp_path)
    assert outcome(tmp_path) == outcome_of_whole_run(run)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "sides"), [("replicated", "sharded", (1, 4)), ("sharded", "replicated", (4, 1))])
def test_resume_in_the_other_form_and_on_another_mesh_continues_the_run(run, tmp_path, first, second, sides):
    """Checkpoints do not depend on the form or the mesh."""
    forms = {"replicated": dataclasses.replace(run, reduce=Reduce()), "sharded": run}
    train(forms[first], tmp_path / "whole")
    train_until(forms[first], tmp_path / "cut", step=12)
    train(dataclasses.replace(forms[second], mesh=Mesh(*sides, cpu_devices=4)), tmp_path / "cut")
    assert relative_difference(last_params(tmp_path / "cut"), last_params(tmp_path / "whole")) < 1e-6


@pytest.mark.slow
def test_phase_on_a_smaller_mesh_continues_with_the_state_of_the_shards(run, tmp_path):
    """Eight devices (2x4) for 16 images in workers of 2, then four (1x4) for 8 images."""
    batch = (Phase(global_batch=16, until_epoch=1.5, per_worker_batch=2), Phase(global_batch=8, per_worker_batch=2))
    config = dataclasses.replace(run, batch=batch, mesh=Mesh(cpu_devices=8, horizontal=4))
    plan = make_plan(config, examples=50, devices=8)
    assert [phase.shape for phase in plan.phases] == [(2, 4), (1, 4)]
    assert tuple(train(config, tmp_path / "sharded").mesh) == (1, 4)
    train(dataclasses.replace(config, reduce=Reduce()), tmp_path / "whole")
    assert relative_difference(last_params(tmp_path / "sharded"), last_params(tmp_path / "whole")) < 1e-6


# What cannot be sharded


def refusal(config, **parts):
    with pytest.raises(ConfigError) as error:
        jaxdp.validation.validate(sharded(with_parts(config, **parts)))
    return str(error.value)


def test_sharded_update_without_a_strategy_that_scatters_is_refused(tiny):
    assert refusal(tiny, reduce={"strategy": "psum"}) == (
        "reduce.update='sharded': reduce.strategy='psum' does not begin with a reduce-scatter and end with an all-gather; "
        "torus does; omit it, or use replicated"
    )


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (
            lambda config, rate, momentum: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(rate, momentum)),
            "optimizer.name='mine': not elementwise: the update of a part of a tensor differs from that part of its update",
        ),
        pytest.param(
            lambda config, rate, momentum: optax.chain(optax.flatten(optax.trace(momentum)), optax.scale(-rate)),
            "optimizer.name='mine' keeps an array of shape",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_optimizer_that_is_falsely_registered_as_elementwise_is_refused(run, tmp_path, build, reason):
    jaxdp.register_optimizer("mine", build, elementwise=True)
    with pytest.raises(ConfigError) as error:
        train(with_parts(run, optimizer={"name": "mine"}), tmp_path / "run")
    assert reason in str(error.value)


class WithScalar(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(x.reshape(len(x), -1)) * self.param("scale", nn.initializers.ones, ())


@pytest.mark.slow
def test_run_with_a_scalar_parameter_equals_the_replicated_one(run, tmp_path):
    register_model("scaled", WithScalar)
    config = dataclasses.replace(run, model=Model(name="scaled", classes=6), optimizer=Optimizer(name="sgd"))
    config = with_parts(config, schedule={"learning_rate": 0.01})
    train(config, tmp_path / "sharded")
    train(dataclasses.replace(config, reduce=Reduce()), tmp_path / "whole")
    assert relative_difference(last_params(tmp_path / "sharded"), last_params(tmp_path / "whole")) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [pytest.param("bfloat16", {}, marks=pytest.mark.slow), ("float32", {"bucket_bytes": 400, "overlap": False})],
)
def test_messages_of_the_plan_are_those_of_the_step(dtype, changes):
    """Each all-gather of parameters, apart from padding."""
    config = sharded(with_parts(step_config(), model={"dtype": dtype, "width": 8, "classes": 8}, reduce=changes))
    planned = sorted(model_summary(config)["gathered_messages"])
    statistics = model_summary(config)["statistics_bytes"]
    found = [4 * one.operand_bytes for one in collectives(config) if one.operation == "all-gather" for _ in range(one.count)]
    found.remove(next(size for size in found if 0 <= size - statistics < 16))
    assert [size for size in sorted(found)] == pytest.approx(planned, abs=32)


@pytest.mark.slow
def test_registered_strategy_that_scatters_shards_the_update(run, tmp_path):
    jaxdp.register_strategy("mine", *stages_of("torus"), scatters=True)
    train(with_parts(run, reduce={"strategy": "mine"}), tmp_path / "mine")
    train(run, tmp_path / "torus")
    assert relative_difference(last_params(tmp_path / "mine"), last_params(tmp_path / "torus")) < 1e-6
    reversed_rows = [
        lambda v: stages_of("torus")[0](jnp.pad(v, (0, -v.size % 2))[::-1]),
        stages_of("torus")[1],
        lambda v: stages_of("torus")[2](v)[::-1],
    ]
    jaxdp.register_strategy("mine", *reversed_rows, scatters=True)
    with pytest.raises(ConfigError, match=r"of a row of the 2x2 mesh do not hold the sum's shards in order"):
        train(with_parts(run, reduce={"strategy": "mine"}), tmp_path / "reversed")
    with pytest.raises(ConfigError, match="a strategy that scatters has a first and a last stage"):
        jaxdp.register_strategy("mine", stages_of("torus")[0], scatters=True)


def test_finetuning_in_shards_keeps_frozen_parameters_whole():
    config = sharded(dataclasses.replace(step_config(), finetune=Finetune(weights="any", frozen_stages=1)))
    layout, whole = state_of(config, make_mesh(2, 4))
    placed = layout.place(whole)
    trained = layout.model.trainable(whole.params, 1)
    assert whole.params.keys() - trained.keys()
    for name, tree in placed.params.items():
        for leaf in jax.tree.leaves(tree):
            assert leaf.sharding.is_fully_replicated == (name not in trained)
