"""Registered linen and nnx modules against Flax itself: gradients, batch statistics, dropout, stages."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.flax_nets import (
    BUILDERS,
    WITH_DROPOUT,
    LinenNet,
    NnxNet,
    by_path,
    flax_gradients,
    nested,
    of_state,
    path_of,
)
from helpers.step import (
    BATCH,
    PER_WORKER,
    PIXELS,
    assert_replicated,
    distributed_gradients,
    hyperparameters,
    initial_params,
    make_batch,
    step_config,
    with_parts,
)
from jax.sharding import PartitionSpec

from jaxdp import models, register_model
from jaxdp.config import Model, Phase
from jaxdp.data import prefetch
from jaxdp.data.augment import augment, normalize
from jaxdp.losses import cross_entropy
from jaxdp.parallel.mesh import AXES, make_mesh
from jaxdp.training.state import create_state
from jaxdp.training.step import make_train_step


def case(name, quick):
    """A network; those that are not in `quick` run with the slow tests."""
    return pytest.param(name, marks=[] if name in quick else pytest.mark.slow)


@pytest.fixture(autouse=True)
def registered():
    for name, build in BUILDERS.items():
        register_model(name, build)
    for name, build in WITH_DROPOUT.items():
        register_model(f"{name}_dropout", build)


def config_of(name, **changes):
    config = step_config(**changes)
    return dataclasses.replace(config, model=Model(name=name, classes=7, norm=config.model.norm))


@functools.cache
def flax_reference(kind, norm):
    """(gradient, mean statistics of the batches) by path, of Flax alone: worker after worker, or the whole batch at once."""
    config = config_of(kind)
    params, stats = initial_params(config)

    def loss_of(batch, network):
        logits = network(normalize(augment(config, batch["images"], batch["positions"]), *PIXELS))
        return cross_entropy(logits, batch["labels"], 0.1).mean()

    size = PER_WORKER if norm == "per_worker" else BATCH
    batches = [{key: rows[i : i + size] for key, rows in make_batch().items()} for i in range(0, BATCH, size)]
    found = jax.tree.map(
        lambda *leaves: np.mean(leaves, axis=0, dtype=np.float64), *flax_gradients(kind, params, stats, loss_of, batches)
    )
    return tuple(by_path(tree) for tree in found)


def assert_same(ours, expected, tolerance=2e-5):
    whole = np.sqrt(sum((leaf**2).sum() for leaf in expected.values()))
    assert ours.keys() == expected.keys()
    for name, leaf in expected.items():
        assert np.linalg.norm(ours[name] - leaf) <= tolerance * np.linalg.norm(leaf) + 1e-6 * whole, name


def compare_with_flax(name, mesh_shape, **changes):
    """The distributed gradient and moments against Flax on one device."""
    config = config_of(name, **changes)
    accumulation = 1 if config.model.norm == "synchronized" else BATCH // PER_WORKER // (mesh_shape[0] * mesh_shape[1])
    gradient, report = distributed_gradients(config, mesh_shape, accumulation)
    expected, updated = flax_reference(name.split("_")[0], config.model.norm)
    assert_same(by_path(gradient), expected)
    moments = by_path(report["moments"])
    means = {path: leaf for path, leaf in moments.items() if path.endswith("mean")}
    assert_same(means, {path: leaf / 0.1 for path, leaf in updated.items() if path.endswith("mean")})  # 0.9 * 0 + 0.1 * mean
    assert_replicated((gradient, report))


@pytest.mark.parametrize("name", [case(name, ("linen_stages",)) for name in BUILDERS])
def test_gradient_and_means_equal_those_of_flax_worker_by_worker(name):
    compare_with_flax(name, (2, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("nnx_stages", "torus"), ("linen_stages", "ring"), ("linen", "torus")],
)
def test_synchronized_gradient_equals_that_of_flax_with_the_whole_batch(name, strategy):
    compare_with_flax(name, (2, 4), norm="synchronized", strategy=strategy)


@pytest.mark.parametrize("kind", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_running_statistics_on_one_device_are_those_of_flax_with_the_same_momentum(kind):
    """The layers' own momentum, Flax's default of 0.99, plays no part."""
    momentum = 0.6
    nets = {"linen": lambda config: LinenNet(momentum=0.99), "nnx": lambda config, rngs: NnxNet(momentum=0.99, rngs=rngs)}
    register_model(kind, nets[kind])
    config = with_parts(config_of(kind), data={"augmentation": "none"}, model={"norm_momentum": momentum})
    config = dataclasses.replace(config, batch=(Phase(global_batch=BATCH, per_worker_batch=BATCH),))
    batches = [make_batch() | {"images": make_batch()["images"][::-1] // shade} for shade in (1, 2, 3)]
    mesh, model = make_mesh(1, 1), models.create(config.model)
    step = make_train_step(config, model, mesh, pixel_stats=PIXELS, accumulation=1)
    state = create_state(config, model, mesh)
    params, stats = by_path(state.params), by_path(state.batch_stats)
    for batch in batches:
        state, _ = step(state, prefetch.to_global(batch, mesh), hyperparameters(0.0))
    ours = by_path(state.batch_stats)
    if kind == "linen":
        variables = {"params": nested(params), "batch_stats": nested(stats)}

        @jax.jit
        def changed(variables, images):
            images = normalize(images, *PIXELS)
            return LinenNet(momentum=momentum).apply(variables, images, train=True, mutable=["batch_stats"])[1]

        for batch in batches:
            variables |= changed(variables, batch["images"])
        expected = by_path(variables["batch_stats"])
    else:
        module = NnxNet(momentum=momentum, rngs=nnx.Rngs(0))
        flat = {path_of(name): jnp.float32(leaf) for name, leaf in (params | stats).items()}
        nnx.update(module, nnx.from_flat_state(flat))
        call = nnx.jit(lambda module, images: module(normalize(images, *PIXELS)))
        for batch in batches:
            call(module, batch["images"])
        expected = of_state(nnx.state(module, nnx.BatchStat))
    assert len(expected) == 4
    assert ours.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(ours[name], leaf, rtol=2e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{name}_dropout" for name in WITH_DROPOUT])
def test_dropout_depends_on_seed_and_position_and_not_on_the_mesh(name):
    config = config_of(name, strategy="psum")
    found = {}
    for case, shape, accumulation, seed in (("mesh", (2, 4), 2, 0), ("one", (1, 1), 16, 0), ("seed", (1, 1), 16, 1)):
        gradient, _ = distributed_gradients(dataclasses.replace(config, seed=seed), shape, accumulation)
        found[case] = by_path(gradient)
    assert_same(found["mesh"], found["one"])
    with pytest.raises(AssertionError):
        assert_same(found["seed"], found["one"], 0.1)


@pytest.mark.parametrize("name", [case(f"{name}_dropout", ("linen_stages_dropout", "nnx_dropout")) for name in WITH_DROPOUT])
def test_dropout_draws_anew_for_another_key_and_evaluation_drops_nothing(name):
    model = models.create(config_of(name).model)
    params, stats = jax.jit(lambda: model.init(jax.random.key(0), (12, 12, 3)))()
    images = np.random.default_rng(1).normal(size=(4, 12, 12, 3)).astype(np.float32)
    apply = jax.jit(lambda number: model.apply(params, stats, images, train=True, key=jax.random.key(number))[0])

    def logits(number):
        return np.asarray(apply(number))

    assert np.array_equal(logits(0), logits(0))
    assert np.abs(logits(0) - logits(1)).max() > 1e-3
    plain = models.create(config_of(name.removesuffix("_dropout")).model)
    evaluated, expected = (
        jax.jit(lambda one=one: one.apply(params, stats, images, train=False)[0])() for one in (model, plain)
    )
    np.testing.assert_array_equal(evaluated, expected)


class LinenNorm(nn.Module):
    axis_name: tuple | None = None

    @nn.compact
    def __call__(self, x, train):
        return nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(x).mean((1, 2))[:, :2]


class NnxNorm(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(x).mean((1, 2))[:, :2]


@pytest.mark.parametrize(
    ("build", "norm", "workers"),
    [
        (lambda config: LinenNorm(), "per_worker", 8),
        (lambda config: LinenNorm(), "synchronized", 1),
        (lambda config: LinenNorm(AXES), "per_worker", 1),  # the layer's own axes
        (lambda config, rngs: NnxNorm(rngs), "per_worker", 8),
        (lambda config, rngs: NnxNorm(rngs), "synchronized", 1),
    ],
    ids=["linen", "linen synchronized", "linen axes", "nnx", "nnx synchronized"],
)
def test_moments_are_those_of_the_images_of_a_worker_by_numpy(build, norm, workers):
    """A worker is a device, or all devices in both dimensions of the mesh."""
    register_model("norm", build)
    model = models.create(Model(name="norm", classes=2, norm=norm))
    images = np.random.default_rng(0).normal(2, 3, (16, 5, 4, 3)).astype(np.float32)
    params, stats = model.init(jax.random.key(0), (5, 4, 3))

    def moments(images):
        return [leaf[None] for leaf in jax.tree.leaves(model.apply(params, stats, images, train=True)[1])]

    rows = PartitionSpec(AXES)
    found = jax.jit(jax.shard_map(moments, mesh=make_mesh(2, 4), in_specs=rows, out_specs=rows, check_vma=False))(images)
    values = images.astype(np.float64).reshape(workers, -1, 3)
    for ours, expected in zip(found, (values.mean(1), (values**2).mean(1)), strict=True):
        np.testing.assert_allclose(ours, np.broadcast_to(expected, (8, 3)), rtol=1e-5)


class TwoDropouts(nnx.Module):
    """The masks of two layers of one shape."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        ones = jnp.ones((len(x), 64))
        return (self.first(ones) * self.second(ones)).mean((1,), keepdims=True) * jnp.ones(2)


def test_nnx_dropout_layers_draw_different_masks():
    """The mean product of equal masks, whose kept values count double, is 2; of independent ones it is 1."""
    register_model("two", lambda config, rngs: TwoDropouts(rngs))
    model = models.create(Model(name="two", classes=2))
    logits, _ = model.apply({"net": {}}, {}, jnp.zeros((64, 2, 2, 3)), train=True, key=jax.random.key(0))
    assert float(logits.mean()) == pytest.approx(1.0, abs=0.1)
