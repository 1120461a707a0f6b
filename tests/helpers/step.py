"""A small network and batch for tests of the training step, and comparisons of trees."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxdp import models
from jaxdp.config import Config, Data, Model, Optimizer, Phase, Reduce
from jaxdp.data import prefetch
from jaxdp.optim import loss_scale
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES, make_mesh
from jaxdp.parallel.shards import partition_spec
from jaxdp.training.state import TrainState
from jaxdp.training.step import make_layout, make_train_step, step_gradient

BATCH, PER_WORKER, PIXELS = 32, 2, (100.0, 60.0)


def step_config(norm="per_worker", strategy="torus", **changes) -> Config:
    """A net with sizes that no axis divides: 5, 7 and 10 channels."""
    return Config(
        data=Data(source="synthetic", image_size=12, augmentation="digits"),
        model=Model(depth=6, width=5, stem="small", classes=7, norm=norm),
        batch=(Phase(global_batch=BATCH, per_worker_batch=PER_WORKER),),
        optimizer=Optimizer(label_smoothing=0.1),
        reduce=Reduce(strategy=strategy),
        **changes,
    )


def linear_config(**changes) -> Config:
    """The same with the model of the fixture `normalized_linear`, for tests of what does not depend on the model."""
    return dataclasses.replace(step_config(**changes), model=Model(name="normalized_linear", classes=7))


def with_parts(config, **parts):
    """The config with fields of its parts changed, model={"dtype": ...}, or with a whole part."""
    changed = {
        name: dataclasses.replace(getattr(config, name), **part) if isinstance(part, dict) else part
        for name, part in parts.items()
    }
    return dataclasses.replace(config, **changed)


def hyperparameters(rate, momentum=0.9, seed=0):
    """The third argument of a step."""
    return {"learning_rate": np.float32(rate), "momentum": np.float32(momentum), "seed": np.uint32(seed)}


def make_batch():
    random = np.random.default_rng(0)
    labels = random.integers(0, 7, BATCH).astype(np.int32)
    images = random.integers(0, 120, (BATCH, 12, 12, 3)) + 18 * labels[:, None, None, None]
    return {
        "images": images.astype(np.uint8),
        "labels": labels,
        "positions": np.arange(500, 500 + BATCH, dtype=np.uint32),
    }


def initial_params(config):
    """Initial parameters without the zero scales that would hide the blocks, and statistics."""
    return jax.tree.map(jnp.array, _initial_params(config.model))  # copies: the step donates its arguments


@functools.cache
def _initial_params(model):
    params, stats = jax.device_get(jax.jit(lambda: models.create(model).init(jax.random.key(3), (12, 12, 3)))())
    return jax.tree.map(lambda p: p + np.float32(0.05), params), stats


@functools.cache
def compiled_step(config, mesh_shape):
    """The training step on a mesh; tests share the program of a config."""
    mesh, devices = make_mesh(*mesh_shape), math.prod(mesh_shape)
    model, accumulation = models.create(config.model), BATCH // PER_WORKER // devices
    return make_train_step(config, model, mesh, pixel_stats=PIXELS, accumulation=accumulation)


def gradient_at(config, model, params, *, stats, batch, accumulation=1, scale=1.0, sent=None, constants=None):
    """`step_gradient` at these parameters, whole on every device. Call it inside `shard_map`."""
    state = TrainState(params, stats, (), (), loss_scale.create("none")._replace(scale=scale))
    layout = make_layout(with_parts(config, reduce={"update": "replicated"}), model, make_mesh(1, 1))
    gradients = step_gradient(config, layout, pixel_stats=PIXELS, accumulation=accumulation)
    return gradients(state, batch, config.seed, sent=sent, constants=constants)


def distributed_gradients(config, mesh_shape, accumulation=1, *, scale=1.0, batch=None, constants=None):
    """`step_gradient` at the whole parameters, on a mesh; the shards of a sharded update are joined.

    batch: default `make_batch()`.
    """
    mesh, model = make_mesh(*mesh_shape), models.create(config.model)
    params, stats = initial_params(config)

    def local(params, stats, batch):
        more = {"accumulation": accumulation, "scale": scale, "constants": constants}
        return gradient_at(config, model, params, stats=stats, batch=batch, **more)

    everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
    check_vma = allreduce.check_vma(config.reduce.strategy)
    sharded = config.reduce.update == "sharded"
    specs = jax.tree.map(lambda p: partition_spec(p.shape), params) if sharded else everywhere
    in_specs, out_specs = (everywhere, everywhere, rows), (specs, everywhere)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    gradient, aux = jax.jit(mapped)(params, stats, prefetch.to_global(batch or make_batch(), mesh))
    if sharded:
        gradient = jax.tree.map(lambda g, p: np.asarray(g).ravel()[: p.size].reshape(p.shape), gradient, params)
    return gradient, aux


def assert_close(ours, expected, tolerance):
    """Each tensor to `tolerance` of its norm, or of a millionth of the whole where it cancels to nearly nothing."""
    whole = float(optax.tree.norm(expected))
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        a = np.asarray(a, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-6 * whole, jax.tree_util.keystr(path)


def assert_replicated(tree):
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, leaf.addressable_shards[0].data)
