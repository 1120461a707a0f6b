"""The dtype that a network casts its parameters to."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers.step import step_config, with_parts

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
