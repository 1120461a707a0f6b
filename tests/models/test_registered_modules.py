"""Runs of registered Flax modules, and the one-line errors of modules that cannot be trained."""

import dataclasses
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.flax_nets import LinenHead, LinenNet, NnxHead, NnxNet, StagedLinenNet, StagedNnxNet
from helpers.runs import outcome, train_shown, train_until

import jaxdp
from jaxdp import models
from jaxdp.config import Checkpoint, Config, Data, Model, Phase
from jaxdp.data.datasets import pixel_stats
from jaxdp.errors import ConfigError
from jaxdp.inference.export import export
from jaxdp.loggers.console import Screen
from jaxdp.models import flax_modules, resnet
from jaxdp.models.summary import summary
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import make_plan
from jaxdp.training.state import abstract_state
from jaxdp.training.step import make_train_step


@pytest.fixture
def one_block_a_stage(monkeypatch):
    """Four stages, with a last map of 1x1."""
    monkeypatch.setitem(resnet.BLOCKS, 18, (1, 1, 1, 1))


NETS = {
    "linen": lambda config: StagedLinenNet(config.classes, dropout=0.3),
    "nnx": lambda config, rngs: StagedNnxNet(config.classes, dropout=0.3, rngs=rngs),
}


def flax_logits(kind, path, images):
    """Logits of an exported file, by Flax alone, loaded as docs/extending.md says."""
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "load_file" in block)
    names = {}
    exec(block, names)
    if kind == "linen":
        return StagedLinenNet(6, dropout=0.3).apply(names["linen_variables"](path), images, train=False)
    module = StagedNnxNet(6, dropout=0.3, rngs=nnx.Rngs(0))
    names["load_into_nnx"](module, path)
    module.eval()
    return module(images)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_run_with_dropout_resumes_bit_for_bit_and_its_export_loads_in_flax(tiny, tmp_path, kind):
    jaxdp.register_model(kind, NETS[kind])
    config = dataclasses.replace(tiny, model=Model(name=kind, classes=6), checkpoint=Checkpoint(every_epochs=0.64), epochs=2.0)
    train_shown(config, tmp_path / "whole", screen=Screen(quiet=True))
    train_until(config, tmp_path / "resumed", step=5)
    train_shown(config, tmp_path / "resumed", screen=Screen(quiet=True))
    assert outcome(tmp_path / "resumed") == outcome(tmp_path / "whole")

    assert jaxdp.evaluate(None, tmp_path / "whole")["eval_examples"] == 23
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    predicted = jaxdp.predict(tmp_path / "whole", images, top=6)
    export(tmp_path / "whole", tmp_path / "w.safetensors")
    mean, std = (np.float32(stat) for stat in pixel_stats(config))
    expected = np.asarray(jax.nn.softmax(flax_logits(kind, tmp_path / "w.safetensors", (images - mean) / std)))
    for row, classes, probabilities in zip(expected, predicted.classes, predicted.probabilities, strict=True):
        np.testing.assert_allclose(probabilities, row[classes], atol=2e-5)


class ByField(nn.Module):
    """Takes fields of the config by their names."""

    classes: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x, deterministic):
        assert self.dtype == "bfloat16"
        return nn.Dense(self.classes, dtype=self.dtype)(nn.Dropout(0.5, deterministic=deterministic)(x.mean((1, 2))))


class OfConfig(nn.Module):
    config: Model

    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(self.config.classes)(nn.BatchNorm(use_running_average=not training)(x).mean((1, 2)))


class NnxByField(nnx.Module):
    def __init__(self, classes, *, rngs):
        self.linear = nnx.Linear(3, classes, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, *, rngs):
        return self.linear(self.dropout(x.mean((1, 2)), rngs=rngs))


@pytest.mark.parametrize(
    "registered",
    [
        ByField,
        OfConfig,
        NnxByField,
        LinenNet(6, dropout=0.1),
        lambda config: ByField(config.classes, config.dtype),
        lambda config, rngs: NnxNet(config.classes, rngs=rngs),
    ],
)
def test_module_class_instance_and_function_are_accepted(registered):
    jaxdp.register_model("mine", registered)
    found = summary(Model(name="mine", classes=6, dtype="bfloat16"), (8, 8, 3))
    assert found["parameters"] > 0
    assert found["segments"] == (("net",),)


MODES = []


class AllModes(nn.Module):
    @nn.compact
    def __call__(self, x, train, training=None, *, deterministic, use_running_average=None, scale=1.0, **others):
        MODES.append((train, training, deterministic, use_running_average, scale, others))
        return nn.Dense(6)(x.mean((1, 2)))


class NnxAllModes(nnx.Module):
    def __init__(self, rngs):
        self.head, self.dropout = NnxHead(3, 6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, train, training=None, *, deterministic, use_running_average=None, scale=1.0, **others):
        MODES.append((train, training, deterministic, use_running_average, scale, others))
        assert self.dropout.deterministic == (not train)
        return self.head(x)


@pytest.mark.parametrize("registered", [AllModes(), lambda config, rngs: NnxAllModes(rngs)], ids=["linen", "nnx"])
def test_call_of_a_module_gets_every_argument_of_the_mode_that_it_takes(registered):
    assert [*flax_modules.MODE_ARGUMENTS] == ["train", "training", "deterministic", "use_running_average"]
    jaxdp.register_model("mine", registered)
    model = models.create(Model(name="mine", classes=6))
    for train in (True, False):
        MODES.clear()
        logits, moments = jax.eval_shape(
            lambda: model.apply(*model.init(jax.random.key(0), (8, 8, 3)), jnp.ones((2, 8, 8, 3)), train=train)  # noqa: B023
        )
        *initial, applied = MODES
        assert applied == (train, train, not train, not train, 1.0, {})
        assert set(map(repr, initial)) <= {repr((False, False, True, True, 1.0, {}))}
        assert (logits.shape, moments) == ((2, 6), {})


class NoField(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return nn.Dense(6)(x.mean((1, 2)))


class Sows(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("cache", "last", jnp.zeros, ())
        return nn.Dense(6)(x.mean((1, 2)))


class OwnNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        mean = self.variable("batch_stats", "mean", jnp.zeros, (3,))
        if train:
            mean.value = x.mean((0, 1, 2))
        return nn.Dense(6)(x.mean((1, 2)) - mean.value)


class FixedMode(nn.Module):
    """A BatchNorm layer that does not depend on `train`."""

    use_running_average: bool

    @nn.compact
    def __call__(self, x):
        return nn.Dense(6)(nn.BatchNorm(use_running_average=self.use_running_average)(x).mean((1, 2)))


class OutsideStages(StagedLinenNet):
    def setup(self):
        super().setup()
        self.scale = self.param("scale", nn.initializers.ones, ())


class NoSubmodule(LinenNet):
    def stages(self):
        return [*self.blocks, lambda x: x.mean((1, 2))]


class Counts(nnx.Module):
    def __init__(self, rngs):
        self.head, self.counter = NnxHead(3, 6, rngs=rngs), nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.counter[...] += 1
        return self.head(x)


class TwoTimesTheSame(LinenNet):
    def stages(self):
        return [self.blocks[1], self.head, self.blocks[1]]


class NoStages(StagedNnxNet):
    def stages(self):
        return []


class NnxOwnNorm(nnx.Module):
    def __init__(self, rngs):
        self.head, self.total = NnxHead(3, 6, rngs=rngs), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        return self.head(x)


class OtherMoments:
    """An object whose moments do not match its statistics."""

    def init(self, key, image_shape):
        return {}, {"norm": {"mean": jnp.zeros(3), "var": jnp.ones(3)}}

    def apply(self, params, batch_stats, images, train):
        return jnp.zeros((len(images), 6)), {"norm": {"mean": images.mean((0, 1, 2))}}


@pytest.mark.parametrize(
    ("registered", "message"),
    [
        (lambda config: TwoTimesTheSame(6), r"stages\(\) returns blocks_1 beside blocks_1; return every submodule once"),
        (lambda config, rngs: NoStages(6, rngs=rngs), r"stages\(\) returns nothing"),
        (lambda config, rngs: NnxOwnNorm(rngs), "the batch statistic total is not of Flax's BatchNorm"),
        (lambda config, rngs: LinenHead(6), "the function with a parameter rngs returns LinenHead, not an nnx module"),
        (NnxHead(3, 6, rngs=nnx.Rngs(0)), "an nnx module holds parameters, but a run draws its own"),
        (lambda config: OtherMoments(), r"moments \['norm/mean'\], .*; return \['norm/mean', 'norm/square'\] in training"),
        (lambda config: LinenHead(3), r"logits of shape \(1, 3\) for 1 image"),
        (lambda config: Sows(), "a collection 'cache'"),
        (lambda config: OwnNorm(), "the batch statistic mean is not of Flax's BatchNorm"),
        (lambda config: NoField(), "__call__ of the module requires 'mask'"),
        (lambda config: OutsideStages(6), "scale belongs to no stage"),
        (lambda config: NoSubmodule(6), r"item 3 of stages\(\) is not a submodule"),
        (lambda config: NnxHead(3, 6, rngs=nnx.Rngs(0)), "has no parameter rngs"),
        (lambda config, rngs: Counts(rngs), "the call changes counter"),
        (FixedMode(False), "BatchNorm_0 has use_running_average=False in evaluation"),
        (FixedMode(True), "BatchNorm_0 has use_running_average=True in training"),
        (dict, r"the class dict cannot be called with \(config\): .*; register a Flax module"),
        (lambda config: None, "the function <lambda> returns None, which is no Flax module and has no method 'init'"),
        (lambda config: 1 / 0, r"the model fails at test_registered_modules.py:\d+: ZeroDivisionError: division by zero"),
    ],
)
def test_module_that_cannot_be_trained_is_refused_in_one_line(registered, message):
    jaxdp.register_model("mine", registered)
    with pytest.raises(ConfigError) as refused:
        summary(Model(name="mine", classes=6), (8, 8, 3))
    assert re.search(message, str(refused.value)), str(refused.value)
    assert "\n" not in str(refused.value)


class NormalizedMeans(nn.Module):
    """Batch normalization of a row for each image, as in many heads."""

    axis: int = -1

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (1, 1))(x).mean((1, 2))
        x = nn.BatchNorm(use_running_average=not train, axis=self.axis, name="norm")(x if self.axis else x.T)
        return nn.Dense(6)(x if self.axis else x.T)


class RematerializedMeans(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.remat(NormalizedMeans, static_argnums=2)()(x, train)


class NnxNormalizedMeans(nnx.Module):
    def __init__(self, rngs, **call):
        self.norm, self.head, self.call = nnx.BatchNorm(3, rngs=rngs), nnx.Linear(3, 6, rngs=rngs), call

    def __call__(self, x):
        return self.head(self.norm(x.mean((1, 2)), **self.call))


ONE_VALUE = {
    "linen": NormalizedMeans(),
    "linen first axis": NormalizedMeans(axis=0),
    "linen rematerialized": RematerializedMeans(),
    "nnx": lambda config, rngs: NnxNormalizedMeans(rngs),
    "resnet": None,
}


def one_value_config(kind, *, norm="per_worker"):
    """Batch normalization over the images of a worker, one value of each."""
    registered = ONE_VALUE.get(kind, kind)
    model = Model(depth=18, width=4, classes=6, norm=norm)
    if registered is not None:
        jaxdp.register_model("mine", registered)
        model = Model(name="mine", classes=6, norm=norm)
    return Config(model=model, data=Data(source="synthetic", image_size=16))


def traced_step(config, mesh_shape, images, accumulation=1):
    """Trace a step of so many images, without compiling it."""
    mesh, model = make_mesh(*mesh_shape), models.create(config.model)
    step = make_train_step(config, model, mesh, pixel_stats=(0.0, 1.0), accumulation=accumulation)
    state = abstract_state(config, model, mesh)
    batch = {
        "images": jax.ShapeDtypeStruct((images, 16, 16, 3), jnp.uint8),
        "labels": jax.ShapeDtypeStruct((images,), jnp.int32),
        "positions": jax.ShapeDtypeStruct((images,), jnp.uint32),
    }
    return step.trace(state, batch, {"learning_rate": 0.1, "momentum": 0.9, "seed": np.uint32(0)})


@pytest.mark.usefixtures("one_block_a_stage")
@pytest.mark.parametrize("kind", [pytest.param(one, marks=pytest.mark.slow if one == "resnet" else []) for one in ONE_VALUE])
def test_batch_normalization_over_one_value_is_refused_by_plan_and_step(kind):
    """A worker is a micro-batch of a device, or with synchronized normalization of all devices."""
    config = one_value_config(kind)
    alone = dataclasses.replace(config, batch=(Phase(4, per_worker_batch=1),))
    with pytest.raises(ConfigError, match=r"^batch\.0\.per_worker_batch=1: .* one value of each channel .* 16x16"):
        make_plan(alone, examples=100, devices=2)
    make_plan(dataclasses.replace(config, batch=(Phase(4, per_worker_batch=2),)), examples=100, devices=2)
    for mesh_shape, images, accumulation in (((1, 1), 1, 1), ((1, 2), 2, 1), ((1, 1), 4, 4), ((1, 2), 4, 2)):
        with pytest.raises(ConfigError, match=r"^per_worker_batch=1: .* has one value of each channel"):
            traced_step(config, mesh_shape, images, accumulation)
    traced_step(config, (1, 2), 4)
    synchronized = one_value_config(kind, norm="synchronized")
    traced_step(synchronized, (1, 2), 4, accumulation=2)
    make_plan(dataclasses.replace(synchronized, batch=alone.batch), examples=100, devices=2)
    with pytest.raises(ConfigError, match=r"^per_worker_batch=1: "):
        traced_step(synchronized, (1, 1), 4, accumulation=4)


@pytest.mark.usefixtures("one_block_a_stage")
@pytest.mark.parametrize("kind", ONE_VALUE)
def test_evaluation_of_one_image_normalizes_by_running_statistics(kind):
    model = models.create(one_value_config(kind).model)
    logits, _ = jax.eval_shape(
        lambda: model.apply(*model.init(jax.random.key(0), (16, 16, 3)), jnp.ones((1, 16, 16, 3)), train=False)
    )
    assert logits.shape == (1, 6)


def test_layers_that_use_running_statistics_in_training_need_no_second_value():
    config = one_value_config(lambda config, rngs: NnxNormalizedMeans(rngs, use_running_average=True))
    traced_step(config, (1, 1), 1)
    make_plan(dataclasses.replace(config, batch=(Phase(1),)), examples=100, devices=1)


def test_an_option_that_cannot_reach_a_registered_module_is_refused():
    jaxdp.register_model("mine", LinenNet(6))
    with pytest.raises(ConfigError) as refused:
        models.create(Model(name="mine", classes=6, drop_path=0.1))
    assert refused.value.field == "model.drop_path"


class DropsInCall(nnx.Module):
    """A stage that appends a random mask, drawn from the `rngs` of its call."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x, rngs):
        mask = jax.random.bernoulli(rngs.dropout(), 0.5, (1, 64)).astype(x.dtype)
        return jnp.concatenate([x.reshape(len(x), -1), self.scale[...] * mask * jnp.ones((len(x), 1))], axis=1)


class TwoRandomStages(nnx.Module):
    def __init__(self, config, rngs):
        self.first, self.second = DropsInCall(rngs), DropsInCall(rngs)

    def stages(self):
        return [self.first, self.second]


def test_stages_draw_different_random_numbers():
    jaxdp.register_model("mine", TwoRandomStages)
    model = models.create(Model(name="mine", classes=3 + 2 * 64))
    params, stats = model.init(jax.random.key(0), (1, 1, 3))
    y, _ = model.apply(params, stats, jnp.zeros((2, 1, 1, 3)), train=True, key=jax.random.key(1))
    first, second = np.asarray(y[0, 3:67]), np.asarray(y[0, 67:])
    assert set(first) == set(second) == {0.0, 1.0}
    assert (first != second).any()
