"""16-bit compute with float32 parameters, loss scaling, clipping, averaged weights, statistics and rematerialization."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.runs import read_records
from helpers.step import (
    BATCH,
    PER_WORKER,
    PIXELS,
    assert_close,
    assert_replicated,
    compiled_step,
    distributed_gradients,
    hyperparameters,
    initial_params,
    linear_config,
    make_batch,
    step_config,
    with_parts,
)

from jaxdp import TrainingError, models, train
from jaxdp.callbacks import checks
from jaxdp.config import Model, Optimizer
from jaxdp.data import prefetch
from jaxdp.data.augment import augment, normalize
from jaxdp.errors import ConfigError
from jaxdp.optim import loss_scale
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.modes.average import include
from jaxdp.training.state import Average, TrainState, create_state
from jaxdp.validation import from_json, to_json


def run(config, steps=1, rate=0.1, change=lambda state: state, mesh_shape=(2, 2)):
    """(state before, state after, last metrics) of some steps on the same batch."""
    mesh, model, step = make_mesh(*mesh_shape), models.create(config.model), compiled_step(config, mesh_shape)
    state = change(create_state(config, model, mesh)._replace(params=initial_params(config)[0]))
    before = jax.tree.map(np.asarray, state)
    for _ in range(steps):
        state, metrics = step(state, prefetch.to_global(make_batch(), mesh), hyperparameters(rate))
    return before, state, {name: value.item() for name, value in metrics.items()}


SGD = {"name": "sgd", "weight_decay": 0.0}


def update_of(config):
    """The negative gradient, as the change of the parameters in one step of SGD.

    The rate is large so that the rounding of parameters near 1 stays below the rounding of the gradient.
    """
    before, after, metrics = run(with_parts(config, optimizer=SGD), rate=1024.0)
    assert_replicated(after)
    state = after.params, after.batch_stats, after.opt_state
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    return jax.tree.map(lambda a, b: (np.asarray(a, np.float64) - b) / 1024, after.params, before.params), metrics


pytestmark = pytest.mark.usefixtures("normalized_linear")


@functools.cache
def exact(config):
    """The update and the metrics of a step in float32."""
    return update_of(config)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.06), ("float16", 0.01)])
def test_gradient_in_16_bits_equals_float32_up_to_rounding(dtype, bound):
    """Rounding of 2^-8 and 2^-11 through seven convolutions and their gradients; parameters and statistics stay float32."""
    config = with_parts(step_config(), model={"dtype": dtype}, optimizer={"loss_scale": 1024.0})
    update, metrics = update_of(config)
    expected, expected_metrics = exact(step_config())
    whole = np.sqrt(sum((u**2).sum() for u in jax.tree.leaves(expected)))
    error = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(jax.tree.leaves(update), jax.tree.leaves(expected), strict=True)))
    assert 1e-5 < error / whole < bound
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=0.02)


@pytest.mark.slow
def test_loss_scale_in_float32_does_not_change_the_gradient():
    update, metrics = update_of(with_parts(linear_config(), optimizer={"loss_scale": 2.0**12}))
    expected, expected_metrics = exact(linear_config())
    assert_close(update, expected, 1e-6)
    assert metrics["gradient_norm"] == pytest.approx(expected_metrics["gradient_norm"], rel=1e-6)
    assert metrics["skipped_steps"] == 0


def test_loss_scale_with_a_float16_wire_prevents_underflow():
    """Gradients a million times smaller vanish in float16 unless the loss is scaled."""
    tiny_loss = with_parts(linear_config(), reduce={"wire_dtype": "float16"})

    def shrunk(scale):
        config = with_parts(tiny_loss, optimizer={"loss_scale": scale})
        return run(with_parts(config, optimizer=SGD), rate=1.0)[2]["gradient_norm"]

    assert shrunk(1.0) == pytest.approx(shrunk(1024.0), rel=1e-2)
    assert shrunk(2.0**-26) < 0.5 * shrunk(1.0)


def test_non_finite_gradient_skips_the_step_and_halves_the_scale(monkeypatch):
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**24)
    config = with_parts(linear_config(), reduce={"wire_dtype": "float16"}, optimizer={"loss_scale": "dynamic"})
    before, after, metrics = run(config)
    assert not np.isfinite(metrics["gradient_norm"])
    assert (metrics["skipped_steps"], metrics["skipped_in_a_row"], metrics["loss_scale"]) == (1, 1, 2.0**24)
    for name in ("params", "batch_stats", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))
    assert float(after.loss_scale.scale) == 2.0**23
    _, after, metrics = run(config, steps=20)
    assert metrics["skipped_in_a_row"] == 0
    assert 1 <= metrics["skipped_steps"] < 20
    assert np.isfinite(metrics["gradient_norm"])


def test_loss_that_overflows_skips_the_step_although_its_gradient_is_finite():
    """Biases of opposite sign near the largest number: their difference is infinite, and softmax is 0 and 1."""
    config = with_parts(linear_config(), guard={"non_finite": "skip"})

    def overflowing(state):
        bias = jnp.full(7, -2e38).at[0].set(2e38)
        return state._replace(params={"net": state.params["net"] | {"bias": bias}})

    before, after, metrics = run(config, change=overflowing)
    assert np.isinf(metrics["loss"])
    assert np.isfinite(metrics["gradient_norm"])
    assert (metrics["skipped_steps"], metrics["skipped_in_a_row"]) == (1, 1)
    for name in ("params", "batch_stats", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))


@pytest.fixture
def too_large(monkeypatch):
    """A dynamic scale that no float16 gradient survives."""
    for name, value in {"MINIMUM": 2.0**39, "INITIAL": 2.0**40, "MAXIMUM": 2.0**41}.items():
        monkeypatch.setattr(loss_scale, name, value)
    monkeypatch.setattr(checks, "GIVE_UP_AFTER", 5)
    return {"loss_scale": "dynamic"}


def test_train_with_consecutive_skipped_steps_raises(tiny, tmp_path, too_large):
    config = with_parts(tiny, reduce={"wire_dtype": "float16"}, optimizer=too_large)
    with pytest.raises(TrainingError, match=r"5 steps in a row were skipped, up to step 5 \(samples 40, learning rate .*scale"):
        train(config, tmp_path)


@pytest.mark.slow
def test_train_with_all_steps_of_a_short_run_skipped_raises(tiny, tmp_path, too_large, monkeypatch):
    monkeypatch.setattr(checks, "GIVE_UP_AFTER", 50)
    config = with_parts(tiny, reduce={"wire_dtype": "float16"}, optimizer=too_large)
    with pytest.raises(TrainingError, match=r"all 15 steps were skipped because no gradient was finite at loss scales of"):
        train(config, tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_static_scale_that_overflows_is_named_in_the_error(tiny, tmp_path):
    config = with_parts(tiny, reduce={"wire_dtype": "float16"}, optimizer={"loss_scale": 2.0**60})
    with pytest.raises(TrainingError, match=r"at step 1 .*if the scale 1.15292e\+18 is too large for float16, lower optimizer"):
        train(config, tmp_path)


@pytest.mark.slow
def test_log_counts_skipped_steps(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**24)
    config = with_parts(tiny, reduce={"wire_dtype": "float16"}, optimizer={"loss_scale": "dynamic"})
    result = train(config, tmp_path)
    steps = read_records(tmp_path)
    counts = [r["skipped_steps"] for r in steps if "skipped_steps" in r]
    assert len(counts) == 15
    assert counts == sorted(counts)
    assert 0 < counts[-1] < 15
    assert result.skipped_steps == counts[-1]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": {"dtype": "float16"}}, "model.dtype='float16': requires loss scaling"),
        ({"reduce": {"wire_dtype": "float16"}}, "reduce.wire_dtype='float16': requires loss scaling"),
        ({"optimizer": {"loss_scale": 0.0}}, "optimizer.loss_scale=0.0: must be none, dynamic or a number from 2\\^-100"),
        ({"optimizer": {"loss_scale": "static"}}, "optimizer.loss_scale='static': must be 'none' or 'dynamic'"),
    ],
)
def test_invalid_loss_scale_raises(parts, message):
    with pytest.raises(ConfigError, match=message):
        from_json(to_json(with_parts(step_config(), model={"depth": 18, **parts.pop("model", {})}, **parts)))


def test_clipping_scales_the_gradient_to_the_norm():
    expected, metrics = exact(linear_config())
    bound = metrics["gradient_norm"] / 4
    update, clipped = update_of(with_parts(linear_config(), optimizer={"clip_norm": bound}))
    assert_close(update, jax.tree.map(lambda u: u / 4, expected), 1e-5)
    assert clipped["gradient_norm"] == pytest.approx(metrics["gradient_norm"], rel=1e-6)  # the log has the norm before clipping
    loose, _ = update_of(with_parts(linear_config(), optimizer={"clip_norm": 2 * metrics["gradient_norm"]}))
    assert_close(loose, expected, 1e-6)


def averages(values, **options):
    """The average after each step."""
    zero = np.zeros((), np.float32)
    average, found = Average({"w": zero}, {}, zero), []
    for value in values:
        average = include(average, {"w": np.float32(value)}, {}, optimizer=Optimizer(**options))
        found.append(float(TrainState({"w": zero}, {}, (), average, ()).eval_variables[0]["w"]))
    return found


@pytest.mark.parametrize(("decay", "steps"), [(0.99, 1200), (0.99998, 300_000)])
@pytest.mark.parametrize("start", ["unbiased", "initial", "warmup"])
def test_average_over_many_steps_equals_float64(start, decay, steps):
    """Unbiased: the weights decay^(n - k) of steps k sum to one. Else timm's formula of ModelEmaV3, whose first decay is 0.

    The warm-up reaches the decay 0.99 at step 1,000. A value that does not change is its own average.
    """
    average, expected, optimizer = 0.0, [], Optimizer(average_decay=decay, average_start=start)
    values = 3 + np.random.default_rng(0).normal(size=steps)
    for step, value in enumerate(values):
        kept = {
            "unbiased": decay * (1 - decay**step) / (1 - decay ** (step + 1)),
            "initial": decay * (step > 0),
            "warmup": min(decay, 1 - (1 + step) ** (-2 / 3)),
        }[start]
        average = kept * average + (1 - kept) * value
        expected.append(average)

    def step(average, value):
        average = include(average, {"w": value}, {}, optimizer=optimizer)
        return average, TrainState({"w": value}, {}, (), average, ()).eval_variables[0]["w"]

    pairs = jnp.asarray(np.stack([values, np.full(steps, 0.7)], 1), jnp.float32)
    _, found = jax.lax.scan(step, Average({"w": jnp.zeros(2)}, {}, jnp.zeros(())), pairs)
    np.testing.assert_allclose(found[:, 0], expected, rtol=2e-6 if steps < 10_000 else 2e-5)
    np.testing.assert_array_equal(found[:, 1], np.float32(0.7))


@pytest.mark.parametrize("use_warmup", [False, True])
def test_average_equals_timms(use_warmup):
    torch, timm = pytest.importorskip("torch"), pytest.importorskip("timm.utils")
    module, values = torch.nn.Linear(1, 1, bias=False), 3 + np.random.default_rng(1).normal(size=50)
    peer, expected = timm.ModelEmaV3(module, decay=0.9, use_warmup=use_warmup), []
    for number, value in enumerate(values):
        torch.nn.init.constant_(module.weight, value)
        peer.update(module, step=number + 1)  # as timm's train.py counts
        expected.append(peer.module.weight.item())
    start = "warmup" if use_warmup else "initial"
    np.testing.assert_allclose(averages(values, average_decay=0.9, average_start=start), expected, rtol=2e-6)


@pytest.mark.slow
def test_average_is_the_bias_corrected_mean_of_all_steps():
    """Weights decay^(n - k) (1 - decay) of step k, over their sum: of parameters and of statistics."""
    decay, steps = 0.75, 3
    config = with_parts(linear_config(), optimizer={"average_decay": decay})
    states = [run(config, steps=n + 1)[1] for n in range(steps)]
    weights = np.array([decay ** (steps - 1 - k) * (1 - decay) for k in range(steps)])
    weights /= weights.sum()
    for place, name in enumerate(("params", "batch_stats")):
        seen = [jax.tree.map(lambda p: np.asarray(p, np.float64), getattr(state, name)) for state in states]
        expected = jax.tree.map(lambda *values: sum(w * v for w, v in zip(weights, values, strict=True)), *seen)
        assert_close(states[-1].eval_variables[place], expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_statistics_in_16_bits_are_averaged_in_float32(dtype):
    """Equal to the mean over single workers up to float32 rounding, far below the rounding of 16 bits."""
    config = with_parts(step_config(), model={"dtype": dtype})
    model = models.create(config.model)
    params, stats = initial_params(config)
    _, together = distributed_gradients(config, (2, 4), 2)
    moments = []

    @jax.jit
    def of_batch(images, positions):
        images = normalize(augment(config, images, positions), *PIXELS)
        return model.apply(params, stats, images, train=True)[1]["bn1"]

    for start in range(0, BATCH, PER_WORKER):
        part = {name: rows[start : start + PER_WORKER] for name, rows in make_batch().items()}
        moments.append(of_batch(part["images"], part["positions"]))
    for name in ("mean", "square"):
        expected = np.mean([np.asarray(m[name], np.float64) for m in moments], axis=0)
        np.testing.assert_allclose(together["moments"]["bn1"][name], expected, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("direct_convolutions")
def test_rematerialization_gives_the_same_gradient_with_fewer_residuals():
    images = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32, 32, 3)), jnp.float32)
    results = []
    for remat in (False, True):
        model = models.create(Model(depth=6, width=8, stem="small", classes=3, remat=remat))
        params, stats = jax.jit(lambda model=model: model.init(jax.random.key(0), (32, 32, 3)))()
        params = jax.tree.map(lambda p: np.asarray(p) + np.float32(0.05), params)

        def loss(params, model=model, stats=stats):
            return (model.apply(params, stats, images, train=True)[0] ** 2).sum()

        residuals = jax.tree.leaves(jax.eval_shape(lambda p, loss=loss: jax.vjp(loss, p)[1], params))
        results.append((jax.jit(jax.grad(loss))(params), sum(k.size * k.dtype.itemsize for k in residuals)))
    (plain, plain_bytes), (again, again_bytes) = results
    assert_close(again, jax.tree.map(lambda g: np.asarray(g, np.float64), plain), 1e-5)
    assert again_bytes < 0.5 * plain_bytes
