"""The estimate of a network's activations, against counts by hand and against what XLA's GPU compiler allocates."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxdp.config import Model
from jaxdp.models.activation_memory import activation_bytes
from jaxdp.registration import register_model

RECORD = Path(__file__).parents[2] / "benchmarks/results/memory.json"
SIDE, CHANNELS = 8, 5


class TwoProducts:
    """Flattened images, a matrix product, `activation`, and a second product to the logits."""

    def __init__(self, activation, classes):
        self.activation, self.classes = activation, classes

    def init(self, key, image_shape):
        size = image_shape[0] * image_shape[1] * image_shape[2]
        return {"first": jnp.zeros((size, CHANNELS)), "second": jnp.zeros((CHANNELS, self.classes))}, {}

    def apply(self, params, batch_stats, images, train):
        hidden = self.activation(images.reshape(len(images), -1) @ params["first"])
        return hidden @ params["second"], {}


def two_products(activation) -> Model:
    register_model("two_products", lambda config: TwoProducts(activation, config.classes))
    return Model(name="two_products", classes=3)


IMAGE = 4 * SIDE * SIDE * 3  # bytes of an image in float32
HIDDEN = 4 * CHANNELS


def test_activations_are_the_operands_of_products():
    """The gradient of each weight needs the left operand of its product: the image, and the hidden layer."""
    assert activation_bytes(two_products(lambda x: x), (SIDE, SIDE, 3)) == IMAGE + HIDDEN


def test_elementwise_operations_before_a_product_keep_one_more_array_at_most():
    """XLA recomputes the chain of tanh from the output of the first product, which is one array however long the chain is."""
    longest = two_products(lambda x: jnp.tanh(jnp.tanh(jnp.tanh(jnp.tanh(x)))))
    assert activation_bytes(longest, (SIDE, SIDE, 3)) <= IMAGE + 2 * HIDDEN


ACTIVATIONS = {
    "identity": lambda x: x,
    "two uses": lambda x: jnp.tanh(x) * jnp.exp(x),
    "relu and mean": lambda x: jnp.maximum(x - x.mean(0), 0),
    "product": lambda x: jnp.sin(x @ jnp.ones((CHANNELS, CHANNELS))),
    "sort": lambda x: jnp.exp(jnp.sort(x, axis=-1)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_compiled_part_keeps_what_the_same_operations_keep(name):
    """Also within another one."""
    function = ACTIVATIONS[name]
    plain = activation_bytes(two_products(function), (SIDE, SIDE, 3))
    assert activation_bytes(two_products(jax.jit(function)), (SIDE, SIDE, 3)) == plain
    assert IMAGE + HIDDEN <= plain <= IMAGE + 4 * HIDDEN
    assert activation_bytes(two_products(jax.jit(lambda x: jax.jit(function)(x))), (SIDE, SIDE, 3)) == plain


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: jnp.sin(x) * jnp.cos(x), IMAGE + 2 * HIDDEN),  # the first product's result, and the second one's operand
        (lambda x: x - x.mean(0), IMAGE + HIDDEN),  # a mean of the batch is no memory of an image
        (lambda x: x.astype(jnp.bfloat16), IMAGE + HIDDEN // 2),
        (lambda x: jax.lax.stop_gradient(jnp.sin(x)), HIDDEN),  # the first weight has no gradient
    ],
    ids=["one input", "mean", "bfloat16", "no gradient"],
)
def test_kept_arrays_are_those_that_no_elementwise_operation_makes_from_others(function, kept):
    assert activation_bytes(two_products(function), (SIDE, SIDE, 3)) == kept


def test_remat_keeps_less_and_frozen_stages_keep_nothing():
    config, shape = Model(depth=50, width=8, classes=4), (64, 64, 3)
    everything = activation_bytes(config, shape)
    assert activation_bytes(Model(depth=50, width=8, classes=4, remat=True), shape) < 0.5 * everything
    assert activation_bytes(config, shape, frozen_stages=5) < 0.01 * everything


@pytest.mark.slow
def test_estimates_equal_what_the_gpu_compiler_allocates():
    """Recorded by benchmarks/compiled.py; the estimates are computed again."""
    tested = 0
    for result in json.loads(RECORD.read_text())["results"]:
        if "autodiff" in result["case"] or "152" in result["case"]:
            continue
        name, dtype, *rest = result["case"].split(", ")
        config = Model(depth=int(name.removeprefix("ResNet-")), dtype=dtype, remat="remat" in rest, classes=1000)
        megabytes = activation_bytes(config, (224, 224, 3)) / 1e6
        assert megabytes == pytest.approx(result["compiled_megabytes_an_image"], rel=0.05), result["case"]
        tested += 1
    assert tested == 4
