"""Size and cost of a network, from an abstract trace, and the number of values that it normalizes over."""

import math
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jaxdp.choices import MODELS
from jaxdp.config import RESNET, Config
from jaxdp.config import Model as ModelConfig
from jaxdp.errors import ConfigError
from jaxdp.models import create, initial_shapes
from jaxdp.models.batch_norm import OneValue
from jaxdp.models.resnet import BLOCKS
from jaxdp.optim.rules import is_matrix_or_larger
from jaxdp.parallel.forward_dtypes import inner_jaxprs

if TYPE_CHECKING:
    from jaxdp.models.registered import RegisteredModel

Phase = Any  # a `jaxdp.planning.PlannedPhase`, whose module is above this one


def check_image_size(config: ModelConfig, size: int, *, trained: int, field: str) -> None:
    """Raise ConfigError if a network for images of height and width `trained` cannot take images of `size`, set by `field`."""
    if trained == size:
        return
    model, images = create(config), jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    params, stats = initial_shapes(model, (trained, trained, 3))
    try:
        jax.eval_shape(lambda p, s, x: model.apply(p, s, x, train=False)[0], params, stats, images)
    except ConfigError as error:
        reason = f"{config.title} cannot take images of another size than data.image_size ({trained}): {error.reason}"
        raise ConfigError(field, size, reason=reason, hint="omit it") from None


def summary(config: ModelConfig, image_shape: tuple[int, int, int], frozen_stages: int = 0) -> dict:
    """Size and cost of a network, from an abstract trace.

    Returns parameters (number of all), macs (multiply-adds of one image), statistics (number of trainable batch statistics),
    decayed and not_decayed (trainable tensors with and without weight decay and trust ratio), sizes (name -> tensor sizes of
    the trainable parameters), segments (the trainable ones), outputs (shapes for one image), and shapes and
    trainable_shapes, both (params, batch_stats).
    """
    model = create(config, platform="any")
    params, stats = initial_shapes(model, image_shape)
    trainable, trainable_stats = (model.trainable(tree, frozen_stages) for tree in (params, stats))
    sizes_by_name = {name: [math.prod(p.shape) for p in jax.tree.leaves(trainable[name])] for name in sorted(trainable)}
    sizes = [size for tensor_sizes in sizes_by_name.values() for size in tensor_sizes]
    mask = jax.tree.leaves(is_matrix_or_larger(trainable))

    def count(decayed: bool) -> dict:
        selected = [size for size, decays in zip(sizes, mask, strict=True) if decays == decayed]
        return {"tensors": len(selected), "parameters": sum(selected)}

    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    trace = jax.make_jaxpr(lambda p, s, x: model.apply(p, s, x, train=False)[0], return_shape=True)
    jaxpr, outputs = trace(params, stats, images)
    if config.name in MODELS.registered:
        cast("RegisteredModel", model).check_training(params, stats, image_shape)
    return {
        "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(params)),
        "sizes": sizes_by_name,
        "shapes": (params, stats),
        "trainable_shapes": (trainable, trainable_stats),
        "segments": model.split_frozen(frozen_stages)[1],
        "statistics": sum(math.prod(s.shape) for s in jax.tree.leaves(trainable_stats)),
        "outputs": outputs,
        "macs": _multiply_adds(jaxpr.jaxpr),
        "decayed": count(True),
        "not_decayed": count(False),
    }


def fewest_values(config: Config, phase: Phase) -> float:
    """The fewest values of a channel that batch normalization averages in a phase of a plan: the last map of a ResNet has them.
    Infinity where nothing is normalized. For a registered model, finds only the case of one value.

    Raises ConfigError for only one.
    """
    model, size, batch = config.model, phase.image_size, phase.per_worker_batch
    images = batch * (phase.devices if model.norm == "synchronized" else 1)
    values, layer = (
        _values_in_resnet(config, size, images) if model.name == RESNET else _values_in_registered(model, size, images)
    )
    if values > 1:
        return values
    flag = f"--batch.{phase.index}."
    larger = f"{flag}per-worker-batch 2"
    if phase.accumulation % 2:
        larger = f"{flag}global-batch {2 * phase.global_batch} {larger}"
    hints = [larger, "--model.norm synchronized"] if phase.devices > 1 else [larger]
    reason = f"{layer} has one value of each channel with images of {size}x{size}, and batch normalization needs two"
    raise ConfigError(f"batch.{phase.index}.per_worker_batch", batch, reason=reason, hint=f"use {', or '.join(hints)}")


def _values_in_resnet(config: Config, size: int, images: int) -> tuple[float, str]:
    """(the fewest values of a channel, the name of its layer) for images of height and width `size`."""
    stages = len(BLOCKS[config.model.depth])
    side = -(-size // 2 ** (stages - 1 if config.model.stem == "small" else stages + 1))
    return math.inf if config.finetune.always_frozen > stages else images * side**2, "the last map"


def _values_in_registered(config: ModelConfig, size: int, images: int) -> tuple[float, str]:
    """(1, the name of a layer of one value), or infinity: only one image can give one value."""
    if images == 1:
        model, shape = create(config, platform="any"), (size, size, 3)
        params, stats = initial_shapes(model, shape)
        try:
            cast("RegisteredModel", model).check_training(params, stats, shape, images=1)
        except OneValue as error:
            return 1, error.layer
    return math.inf, ""


def _multiply_adds(jaxpr: Jaxpr) -> int:
    """Multiply-adds of the convolutions and matrix products in a jaxpr; padding counts, as in the literature."""
    total = 0

    def shape_of(variable: Any) -> tuple[int, ...]:
        return variable.aval.shape

    for equation in jaxpr.eqns:
        shape = shape_of(equation.outvars[0]) if equation.outvars else ()
        if equation.primitive.name == "conv_general_dilated":
            kernel = shape_of(equation.invars[1])
            out_channel = equation.params["dimension_numbers"].rhs_spec[0]
            total += math.prod(shape) * math.prod(kernel) // kernel[out_channel]
        elif equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            total += math.prod(shape) * math.prod(shape_of(equation.invars[0])[i] for i in contracted)
        total += sum(map(_multiply_adds, inner_jaxprs(equation)))
    return total
