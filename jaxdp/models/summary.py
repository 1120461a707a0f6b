"""Size and cost of a network, and what it normalizes over, from abstract traces."""

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec

from jaxdp.choices import MODELS
from jaxdp.config import RESNET
from jaxdp.config import Model as ModelConfig
from jaxdp.errors import ConfigError
from jaxdp.models import create, initial_shapes
from jaxdp.models.batch_norm import counting_values
from jaxdp.optim.lars import is_matrix_or_larger
from jaxdp.parallel.forward_dtypes import inner_jaxprs
from jaxdp.parallel.mesh import abstract_mesh

if TYPE_CHECKING:
    from jaxdp.models.registered import RegisteredModel


def check_image_size(config: ModelConfig, size: int, *, trained: int, field: str) -> None:
    """Raise ConfigError if a network for images of height and width `trained` cannot take those of `size`, set by `field`."""
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
    the trainable parameters), segments (the trainable ones), and shapes and trainable_shapes, both (params, batch_stats).
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
    jaxpr = jax.make_jaxpr(lambda p, s, x: model.apply(p, s, x, train=False)[0])(params, stats, images)
    if config.name in MODELS.registered:
        cast("RegisteredModel", model).check_training(params, stats, image_shape)
    return {
        "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(params)),
        "sizes": sizes_by_name,
        "shapes": (params, stats),
        "trainable_shapes": (trainable, trainable_stats),
        "segments": model.split_frozen(frozen_stages)[1],
        "statistics": sum(math.prod(s.shape) for s in jax.tree.leaves(trainable_stats)),
        "macs": _multiply_adds(jaxpr.jaxpr),
        "decayed": count(True),
        "not_decayed": count(False),
    }


def count_normalized(
    config: ModelConfig, image_size: int, *, batch: int, mesh: tuple[int, int] = (1, 1), frozen_stages: int = 0
) -> dict[str, int]:
    """The number of values of a channel that each layer of batch normalization averages over in training, by its name.

    batch: images of a worker; mesh: (vertical, horizontal), over whose devices a layer may be synchronized. Layers of
    registered objects that are no Flax modules are not known. Raises ConfigError if a registered model fails.
    """
    trace = _count_in_resnet if config.name == RESNET else _count_in_layers  # other names may be registered again
    return {**trace(config, image_size, batch, mesh=mesh, frozen_stages=frozen_stages)}


def _count_in_layers(
    config: ModelConfig, image_size: int, batch: int, *, mesh: tuple[int, int], frozen_stages: int
) -> dict[str, int]:
    model = create(config, platform="any")
    images = jax.ShapeDtypeStruct((batch, image_size, image_size, 3), jnp.float32)
    params, stats = initial_shapes(model, images.shape[1:])
    frozen, trainable = model.split_frozen(frozen_stages)

    def trace(params: dict, stats: dict, x: jax.Array) -> None:
        for segment in (*frozen, *trainable):
            train = segment not in frozen
            x, _ = model.apply_segment(params, stats, x, segment=segment, train=train, key=jax.random.key(0))

    everywhere = PartitionSpec()
    mapped = jax.shard_map(trace, mesh=abstract_mesh(*mesh), in_specs=everywhere, out_specs=everywhere, check_vma=False)
    with counting_values() as counts:
        jax.eval_shape(mapped, params, stats, images)
    return counts


_count_in_resnet = lru_cache(_count_in_layers)


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
