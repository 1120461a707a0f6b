"""The dtype that a network casts its parameters to."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers.step import step_config, with_parts
from jax import lax

from jaxdp import models, register_model
from jaxdp.config import Model, Phase
from jaxdp.parallel.forward_dtypes import forward_dtypes

BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


def dtypes_of(config):
    model = models.create(config.model)
    params, batch_stats = jax.eval_shape(lambda: model.init(jax.random.key(0), (12, 12, 3)))
    return params, forward_dtypes(config, model, params=params, batch_stats=batch_stats, devices=4)


@pytest.mark.parametrize(
    "changes",
    [{}, {"batch_norm": "folded"}, {"remat": True}, {"norm": "synchronized"}, {"drop_path": 0.1}],
)
@pytest.mark.usefixtures("direct_convolutions")
def test_resnet_in_bfloat16_uses_its_matrices_in_bfloat16_and_batch_normalization_in_float32(changes):
    params, dtypes = dtypes_of(with_parts(step_config(), model={"dtype": "bfloat16", **changes}))
    for (path, leaf), dtype in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(dtypes), strict=True):
        assert dtype == (BFLOAT16 if leaf.ndim > 1 else FLOAT32), jax.tree_util.keystr(path)


def test_network_in_float32_uses_all_parameters_in_float32():
    assert set(jax.tree.leaves(dtypes_of(step_config())[1])) == {FLOAT32}


class Mixed(nn.Module):
    """A table that is added in float32, a kernel that is used in 16 bits, and one that is used in both."""

    classes: int

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        x = x + self.param("table", nn.initializers.normal(), (1, x.shape[-1]))
        both = self.param("both", nn.initializers.normal(), (x.shape[-1], 8))
        x = x @ both + (x.astype(jnp.bfloat16) @ both.astype(jnp.bfloat16)).astype(jnp.float32)
        return nn.Dense(self.classes, dtype=jnp.bfloat16, name="head")(x).astype(jnp.float32)


def test_parameters_that_a_registered_network_uses_in_float32_are_gathered_in_float32():
    register_model("mixed", Mixed)
    config = dataclasses.replace(step_config(), model=Model(name="mixed", classes=7, dtype="bfloat16"))
    _, dtypes = dtypes_of(config)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(dtypes)]
    found = dict(zip(names, jax.tree.leaves(dtypes), strict=True))
    expected = {"table": FLOAT32, "both": FLOAT32, "head/kernel": BFLOAT16, "head/bias": BFLOAT16}
    assert {name: found[next(full for full in found if full.endswith(name))] for name in expected} == expected
    assert len(found) == len(expected)


class FloatForLargeBatches(Mixed):
    """Uses its kernel in float32 if the batch has more than two images."""

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        kernel = self.param("kernel", nn.initializers.normal(), (x.shape[-1], self.classes))
        return x @ kernel if len(x) > 2 else (x.astype(jnp.bfloat16) @ kernel.astype(jnp.bfloat16)).astype(jnp.float32)


@pytest.mark.parametrize(("batches", "expected"), [((2, 1), BFLOAT16), ((2, 4), FLOAT32), ((4, 2), FLOAT32)])
def test_dtype_covers_the_batches_of_all_phases(batches, expected):
    register_model("mixed", FloatForLargeBatches)
    phases = tuple(Phase(global_batch=8, per_worker_batch=batch) for batch in batches)
    config = dataclasses.replace(step_config(), model=Model(name="mixed", classes=7, dtype="bfloat16"), batch=phases)
    assert jax.tree.leaves(dtypes_of(config)[1]) == [expected]


SEEN = []  # shapes of the images with which `Uses` was traced


class Uses(nn.Module):
    """Kernels that are used in many ways."""

    classes: int

    @nn.compact
    def __call__(self, x):
        SEEN.append(x.shape)
        weights = {name: self.param(name, nn.initializers.normal(), (3, self.classes)) for name in sorted(USES)}
        images = x.mean((1, 2))
        return sum((images.astype(kernel.dtype) @ kernel).astype(jnp.float32) for kernel in self.each(weights))

    def each(self, weights):
        return [kernel for name, weight in weights.items() for kernel in USES[name][0](weight)]


def half(kernel):
    return kernel.astype(jnp.bfloat16)


def scanned(kernel):
    return lax.scan(lambda total, _: (total + half(kernel).sum(), None), jnp.bfloat16(0), None, length=2)[0] * half(kernel)


# Uses of a kernel, and whether all of them are in bfloat16.
USES = {
    "cast": (lambda kernel: [half(kernel)], True),
    "cast twice": (lambda kernel: [half(kernel), half(kernel) * 2], True),
    "cast after a transpose": (lambda kernel: [half(kernel.T).T], True),
    "cast after a slice": (
        lambda kernel: [half(kernel[::-1]), half(kernel[:2].reshape(1, -1)[:, :9]).sum() + half(kernel)],
        True,
    ),
    "used after a transpose": (lambda kernel: [half(kernel), kernel.T.T[::-1]], False),
    "in float32": (lambda kernel: [kernel], False),
    "in both": (lambda kernel: [half(kernel), kernel], False),
    "in a call": (lambda kernel: [jax.jit(half)(kernel)], True),
    "in a call in float32": (lambda kernel: [half(jax.jit(lambda one, other: one + other)(1.0, kernel))], False),
    "returned by a call": (lambda kernel: [half(jax.jit(lambda kernel: (kernel, half(kernel)))(kernel)[0])], True),
    "in a call of a call": (
        lambda kernel: [jax.jit(lambda one, other: jax.jit(half)(other) + one)(jnp.bfloat16(0), kernel)],
        True,
    ),
    "in a loop": (lambda kernel: [scanned(kernel)], True),
    "in a branch": (lambda kernel: [lax.cond(jnp.arange(2)[0] > 0, half, lambda kernel: half(-kernel), kernel)], False),
    "rounded": (lambda kernel: [half(lax.reduce_precision(kernel, 8, 7))], True),
    "rounded to float16": (lambda kernel: [half(lax.reduce_precision(kernel, 5, 10))], False),
    "rounded to 12 bits": (lambda kernel: [half(lax.reduce_precision(kernel, 8, 3))], False),
    "not used": (lambda kernel: [], True),
}


def test_dtype_of_every_use_of_a_kernel():
    register_model("uses", Uses)
    config = dataclasses.replace(step_config(), model=Model(name="uses", classes=3, dtype="bfloat16"))
    params, dtypes = dtypes_of(config)
    names = [jax.tree_util.keystr(path[-1:], simple=True) for path, _ in jax.tree.leaves_with_path(params)]
    found = dict(zip(names, jax.tree.leaves(dtypes), strict=True))
    assert found == {name: BFLOAT16 if of_half else FLOAT32 for name, (_, of_half) in USES.items()}


def test_network_is_traced_with_the_images_of_a_worker_of_each_phase():
    """Fewer images than devices leave one for each that has any."""
    register_model("uses", Uses)
    phases = Phase(13), Phase(2, image_size=8), Phase(8, per_worker_batch=5), Phase(12)
    config = dataclasses.replace(step_config(), model=Model(name="uses", classes=3, dtype="bfloat16"), batch=phases)
    model = models.create(config.model)
    params, batch_stats = jax.eval_shape(lambda: model.init(jax.random.key(0), (12, 12, 3)))
    SEEN.clear()
    forward_dtypes(config, model, params=params, batch_stats=batch_stats, devices=4)
    assert sorted(SEEN) == [(1, 8, 8, 3), (3, 12, 12, 3), (5, 12, 12, 3)]
