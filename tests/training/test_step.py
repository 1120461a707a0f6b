"""The step's gradient, statistics and update, against one device that sees the same micro-batches one after the other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.float64_resnet import mean_gradient
from helpers.step import (
    BATCH,
    PER_WORKER,
    PIXELS,
    assert_close,
    assert_replicated,
    compiled_step,
    distributed_gradients,
    gradient_at,
    hyperparameters,
    initial_params,
    linear_config,
    make_batch,
    step_config,
    with_parts,
)
from jax.sharding import PartitionSpec

from jaxdp import models
from jaxdp.config import Optimizer
from jaxdp.data import prefetch
from jaxdp.data.augment import augment, normalize
from jaxdp.losses import cross_entropy
from jaxdp.models import resnet
from jaxdp.optim import build_optimizer
from jaxdp.parallel.mesh import AXES, make_mesh
from jaxdp.parallel.traffic import find_collectives
from jaxdp.strategies import STRATEGIES
from jaxdp.training.batch_statistics import update_statistics
from jaxdp.training.modes import row_major
from jaxdp.training.state import create_state
from jaxdp.training.step import make_train_step

MESHES = [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1)]


@functools.cache
def reference(norm, config):
    """(gradient, loss, moments) on one device without a mesh: worker after worker, or the whole batch at once."""
    model = models.create(config.model)
    params, stats = initial_params(config)

    def loss_of(params, part):
        images = augment(config, part["images"], part["positions"])
        logits, moments = model.apply(params, stats, normalize(images, *PIXELS), train=True)
        return cross_entropy(logits, part["labels"], 0.1).mean(), moments

    gradient_of = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    size = PER_WORKER if norm == "per_worker" else BATCH
    parts = [
        gradient_of(params, {name: rows[i : i + size] for name, rows in make_batch().items()}) for i in range(0, BATCH, size)
    ]
    mean = jax.tree.map(lambda *x: np.mean(np.stack(x).astype(np.float64), axis=0), *parts)
    return mean[1], mean[0][0], mean[0][1]


def assert_same_gradient(found, reference):
    """found: of `distributed_gradients`, the same on every device. reference: (gradient, loss, moments)."""
    (gradient, report), (expected, loss, moments) = found, reference
    assert_close(gradient, expected, 1e-5)
    assert_close(report["moments"], moments, 1e-5)
    assert float(report["loss"]) == pytest.approx(loss, rel=1e-6)
    assert_replicated((gradient, report))


def case(name, shape):
    """A strategy on a mesh; all but two run with the slow tests."""
    return pytest.param(name, shape, marks=[] if shape == (2, 4) and name in ("torus", "psum") else pytest.mark.slow)


CASES = [case(name, shape) for name in STRATEGIES for shape in MESHES]


@pytest.mark.parametrize(("strategy", "mesh_shape"), CASES)
def test_gradient_with_statistics_per_worker_equals_one_device_worker_by_worker(normalized_linear, mesh_shape, strategy):
    """Strategies that scatter reduce the gradients of a ResNet, except on the quick mesh: a linear network compiles faster."""
    accumulation = BATCH // PER_WORKER // (mesh_shape[0] * mesh_shape[1])
    config_of = step_config if STRATEGIES[strategy].scatters and mesh_shape != (2, 4) else linear_config
    found = distributed_gradients(config_of(strategy=strategy), mesh_shape, accumulation)
    assert_same_gradient(found, reference("per_worker", config_of()))


@pytest.mark.parametrize("mesh_shape", [(2, 4), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((1, 8), (8, 1)))])
def test_gradient_with_synchronized_statistics_equals_one_device_with_the_whole_batch(mesh_shape):
    found = distributed_gradients(step_config("synchronized"), mesh_shape, 1)
    assert_same_gradient(found, reference("synchronized", step_config()))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["per_worker", "synchronized"])
@pytest.mark.usefixtures("direct_convolutions")
def test_gradient_with_folded_batch_norm_equals_that_of_separate_on_one_device(norm):
    mesh_shape, config = (2, 4), with_parts(step_config(norm), model={"batch_norm": "folded"})
    workers = BATCH // PER_WORKER // (mesh_shape[0] * mesh_shape[1])
    found = distributed_gradients(config, mesh_shape, workers if norm == "per_worker" else 1)
    assert_same_gradient(found, reference(norm, step_config()))


@pytest.mark.slow
@pytest.mark.usefixtures("direct_convolutions")
def test_gradient_of_folded_bottlenecks_equals_one_device_in_float64(monkeypatch):
    """Worker after worker. The first three stages fold; in the last one the batch of a worker has too few rows."""
    monkeypatch.setitem(resnet.BLOCKS, 50, (2, 2, 1, 1))  # blocks at the beginning of a stage and behind another of it
    config, batch = with_parts(step_config(), model={"depth": 50, "width": 3, "batch_norm": "folded"}), make_batch()
    found = distributed_gradients(config, (4, 2), BATCH // PER_WORKER // 8)
    images = normalize(jax.jit(functools.partial(augment, config))(batch["images"], batch["positions"]), *PIXELS)
    parts = [(images[i : i + PER_WORKER], batch["labels"][i : i + PER_WORKER]) for i in range(0, BATCH, PER_WORKER)]
    assert_same_gradient(found, mean_gradient(initial_params(config)[0], parts, 50, config.optimizer.label_smoothing))


def with_options(form, options):
    """The config of a test with a form of batch normalization, and fields of its parts changed."""
    return with_parts(step_config(), **options | {"model": {"batch_norm": form} | options.get("model", {})})


# Options that change the program of the folded form: the test compares it with the separate form under the same option.
FOLDED_OPTIONS = {
    "ImageNet's stem, remat and small buckets": {
        "model": {"remat": True, "stem": "imagenet"},
        "reduce": {"bucket_bytes": 400},
    },
    "frozen stages and a loss scale": {
        "finetune": {"weights": "any", "frozen_stages": 1},
        "optimizer": {"loss_scale": 1024.0},
    },
}


@pytest.mark.parametrize(
    "options", [pytest.param(*one, marks=pytest.mark.slow) for one in zip(FOLDED_OPTIONS.values())], ids=FOLDED_OPTIONS
)
@pytest.mark.usefixtures("direct_convolutions")
def test_gradient_with_folded_batch_norm_equals_that_of_separate_with_an_option(options):
    expected, report = distributed_gradients(with_options("separate", options), (2, 2), 4)
    gradient, ours = distributed_gradients(with_options("folded", options), (2, 2), 4)
    assert_close(gradient, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), expected), 2e-5)
    assert_close(ours["moments"], report["moments"], 1e-5)
    assert float(ours["loss"]) == pytest.approx(float(report["loss"]), rel=1e-6)


def stepped(config, mesh_shape, rates=(0.3, 0.2)):
    mesh, model = make_mesh(*mesh_shape), models.create(config.model)
    accumulation = BATCH // PER_WORKER // (mesh_shape[0] * mesh_shape[1])
    step = make_train_step(config, model, mesh, pixel_stats=PIXELS, accumulation=accumulation)
    state = create_state(config, model, mesh)
    for rate in rates:
        state, metrics = step(state, prefetch.to_global(make_batch(), mesh), hyperparameters(rate))
    return state, metrics


@pytest.mark.slow
def test_two_steps_give_the_same_state_on_every_mesh():
    """Parameters, velocities and running statistics, to float32 rounding: worker batches, not devices, decide."""
    states = {shape: stepped(step_config(), shape) for shape in [(1, 1), (2, 4), (8, 1)]}
    expected, metrics = states[(1, 1)]
    for state, other in states.values():
        assert_replicated(state)
        assert_close(state.params, expected.params, 1e-5)
        assert_close(state.batch_stats, expected.batch_stats, 1e-5)
        assert_close(state.opt_state, expected.opt_state, 1e-4)
        for name in metrics:
            assert float(other[name]) == pytest.approx(float(metrics[name]), rel=1e-4)


def test_a_step_is_the_optimizer_applied_to_the_mean_gradient(normalized_linear):
    """The update, the metrics and the one moving-average update, recomputed outside the mesh from the gradient."""
    config = dataclasses.replace(linear_config(), optimizer=Optimizer(label_smoothing=0.1, weight_decay=1e-3))
    mesh, model = make_mesh(2, 4), models.create(config.model)
    start = create_state(config, model, mesh)
    before = jax.tree.map(np.asarray, start)

    def local(params, stats, batch):
        return gradient_at(config, model, params, stats=stats, batch=batch, accumulation=2)

    everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(everywhere, everywhere, rows), out_specs=everywhere)
    gradient, report = jax.tree.map(
        np.asarray, jax.jit(mapped)(start.params, start.batch_stats, prefetch.to_global(make_batch(), mesh))
    )
    state, metrics = stepped(config, (2, 4), rates=(0.3,))
    transform = build_optimizer(config.optimizer, 0.3, 0.9)
    updates, _ = transform.update(gradient, transform.init(before.params), before.params)
    assert_close(state.params, optax.apply_updates(before.params, updates), 1e-6)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(gradient)))
    assert float(metrics["gradient_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(report["loss"]), rel=1e-6)
    mean = report["moments"]["norm"]["mean"].astype(np.float64)
    square = report["moments"]["norm"]["square"].astype(np.float64)
    np.testing.assert_allclose(state.batch_stats["norm"]["mean"], 0.1 * mean, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state.batch_stats["norm"]["var"], 0.9 + 0.1 * (square - mean**2), rtol=1e-4)


@pytest.mark.parametrize(("wire_dtype", "factor"), [("float32", 1.0), ("float16", 1e6), ("float16", 1e-6)])
@pytest.mark.parametrize(
    "reduction",
    [
        {},
        {"update": "sharded"},
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({"overlap": False}, {"update": "sharded", "overlap": False})),
    ],
    ids=str,
)
def test_class_weights_of_the_global_batch_divide_the_loss(normalized_linear, reduction, wire_dtype, factor):
    """Eight devices with two micro-batches each, whose weights differ, against one sum over all images in float64. A factor of
    all weights cancels, though float16 holds no gradient that is multiplied by it."""
    weights = tuple(factor * (0.1 + float(label) ** 2) for label in range(7))
    scale = 64.0 if wire_dtype == "float16" else 1.0
    config = with_parts(
        linear_config(),
        optimizer={"class_weights": weights, "loss_scale": scale if scale > 1 else "none"},
        reduce={"wire_dtype": wire_dtype, **reduction},
        data={"augmentation": "none"},
    )
    gradient, report = distributed_gradients(config, (2, 4), 2, scale=scale)
    batch, params = make_batch(), jax.tree.map(lambda x: np.asarray(x, np.float64), initial_params(config)[0]["net"])
    target = 0.9 * np.eye(7)[batch["labels"]] + 0.1 / 7
    total, kernel, bias, correct = 0.0, 0.0, 0.0, 0
    for first in range(0, BATCH, PER_WORKER):  # batch normalization is per worker
        rows = slice(first, first + PER_WORKER)
        images = (batch["images"][rows].astype(np.float64) - PIXELS[0]) / PIXELS[1]
        mean, square = images.mean((0, 1, 2)), (images**2).mean((0, 1, 2))
        features = ((images - mean) / np.sqrt(square - mean**2 + 1e-5)).reshape(PER_WORKER, -1)
        logits = features @ params["kernel"] + params["bias"]
        correct += (logits.argmax(1) == batch["labels"][rows]).sum()
        log_softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        weighted = weights * target[rows]
        total -= (weighted * log_softmax).sum()
        error = weighted.sum(1, keepdims=True) * np.exp(log_softmax) - weighted
        kernel, bias = kernel + features.T @ error, bias + error.sum(0)
    divisor = np.take(weights, batch["labels"]).sum()
    assert float(report["loss"]) == pytest.approx(total / divisor, rel=1e-5)
    assert float(report["accuracy"]) == correct / BATCH
    expected = {"net": {"bias": bias / divisor, "kernel": kernel / divisor}}
    assert_close(gradient, expected, 1e-5 if wire_dtype == "float32" else 2e-3)
    assert set(report) == {"loss", "accuracy", "moments"}


@pytest.mark.parametrize("optimizer", [{}, {"class_weights": (1.0,) * 7}], ids=str)
@pytest.mark.parametrize(("overlap", "accumulation"), [(True, 1), (True, 2), (False, 2)])
def test_every_message_of_a_step_is_listed_for_an_audit(normalized_linear, overlap, accumulation, optimizer):
    """The buckets that an audit is given have the bytes of all collectives that the step's strategy runs."""
    config = with_parts(linear_config(strategy="psum"), optimizer=optimizer, reduce={"overlap": overlap})
    mesh, model, reductions = make_mesh(2, 4), models.create(config.model), []

    def local(params, stats, batch):
        return gradient_at(config, model, params, stats=stats, batch=batch, accumulation=accumulation, sent=reductions)

    everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(everywhere, everywhere, rows), out_specs=everywhere)
    jaxpr = jax.make_jaxpr(mapped)(*initial_params(config), make_batch())
    sent = [one.operand_bytes for one in find_collectives(jaxpr, dict(mesh.shape)) for _ in range(one.count)]
    listed = [bucket.contribution for _, buckets in reductions for bucket in buckets]
    assert sorted(sent) == sorted(vector.size * vector.dtype.itemsize for vector in listed)


@pytest.mark.slow
def test_class_weights_divide_no_loss_of_mixed_labels(normalized_linear):
    """Twice the weights, twice the loss and the gradient, as in PyTorch where labels are probabilities."""

    def found(factor):
        optimizer = {"class_weights": tuple(factor * (1.0 + label) for label in range(7))}
        config = with_parts(linear_config(), optimizer=optimizer, data={"mix": "mixup"})
        gradient, report = distributed_gradients(config, (2, 2), 4)
        return {"loss": report["loss"], "gradient": gradient}

    once, twice = found(1.0), found(2.0)
    assert once["loss"] > 0
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(2 * np.asarray(a), b), once, twice)


def test_random_numbers_of_a_step_follow_the_seed_that_it_is_given(normalized_linear):
    """All seeds share a program: the step compiled for seed 0 does with seed 1 what the step of seed 1 does."""
    mesh, batch = make_mesh(2, 2), make_batch()

    def loss(config, seed):
        state = create_state(linear_config(), models.create(config.model), mesh)
        _, metrics = compiled_step(config, (2, 2))(state, prefetch.to_global(batch, mesh), hyperparameters(0.1, seed=seed))
        return float(metrics["loss"])

    assert loss(linear_config(), 1) == loss(linear_config(seed=1), 1) != loss(linear_config(), 0)


def test_variance_over_workers_counts_the_spread_of_their_means():
    """Two workers with means +1 and -1 and no variance of their own: the variance of both together is 1, not 0."""
    stats = {"bn": {"mean": jnp.zeros(1), "var": jnp.zeros(1)}}
    moments = {"bn": {"mean": jnp.zeros(1), "square": jnp.ones(1)}}  # averages of (+1, -1) and (1, 1)
    new = update_statistics(stats, moments, decay=0.0)
    assert float(new["bn"]["var"][0]) == 1.0


def test_the_state_is_donated(normalized_linear):
    config = linear_config()
    mesh, model = make_mesh(2, 4), models.create(config.model)
    state = create_state(config, model, mesh)
    step = make_train_step(config, model, mesh, pixel_stats=PIXELS, accumulation=2)
    step(state, prefetch.to_global(make_batch(), mesh), hyperparameters(0.1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))


def test_one_gpu_writes_the_gradient_of_each_kernel_in_the_order_of_its_dimensions():
    """Behind a barrier as a vector, which has one order only; other platforms and vectors do not need it."""
    gradient = {"kernel": np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4), "matrix": np.ones((2, 3)), "bias": np.ones(2)}
    step = jax.jit(lambda: row_major.with_row_major_gradient(lambda *_: (gradient, {}))(None, {}, 0)[0])
    for platform, count in {"cuda": 1, "rocm": 1, "cpu": 0, "tpu": 0}.items():
        text = step.trace().lower(lowering_platforms=(platform,)).as_text()
        assert text.count("optimization_barrier") == count
    jax.tree.map(np.testing.assert_array_equal, row_major._row_major(gradient), gradient)


@pytest.mark.parametrize("mesh_shape", [(1, 1), (1, 2)])
def test_only_the_step_of_one_device_writes_it_in_that_order(mesh_shape):
    config = step_config()
    mesh, model = make_mesh(*mesh_shape), models.create(config.model)
    state = create_state(config, model, mesh)
    step = make_train_step(config, model, mesh, pixel_stats=PIXELS)
    traced = step.trace(state, prefetch.to_global(make_batch(), mesh), hyperparameters(0.1))
    texts = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu"))
    on_gpu, on_cpu = (text.count("optimization_barrier") for text in texts)
    assert on_gpu - on_cpu == sum(leaf.ndim > 2 for leaf in jax.tree.leaves(state.params)) * (mesh.size == 1)
