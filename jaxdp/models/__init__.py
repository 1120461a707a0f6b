"""Networks as pure functions (`create` returns a `Model`), their batch normalization, and weight files."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec

from jaxdp.choices import MODELS
from jaxdp.config import RESNET
from jaxdp.config import Model as ModelConfig
from jaxdp.errors import ConfigError
from jaxdp.models.batch_norm import counting_values
from jaxdp.models.folded_batch_norm import Projection
from jaxdp.models.registered import RegisteredModel, build_registered
from jaxdp.models.resnet import BLOCKS, ResNet
from jaxdp.optim.lars import is_matrix_or_larger
from jaxdp.parallel.mesh import AXES, abstract_mesh


@dataclass(frozen=True)
class Model:
    """A ResNet without its parameters.

    A network is a sequence of segments: the stem, every block, the head. Each segment is a tuple of parameter names.
    """

    module: ResNet

    @property
    def segments(self) -> tuple[tuple[str, ...], ...]:
        """Parameter names of each segment, in forward order."""
        return self.module.segments

    @property
    def draws_for_each_image(self) -> bool:
        """Whether the key of a step is one for each image: that of drop-path."""
        return self.module.drop_path > 0

    def split_frozen(self, frozen_stages: int) -> tuple[tuple, tuple]:
        """(frozen segments, trainable segments). frozen_stages: 0 none, 1 the stem, 2 also the first ResNet stage, ..."""
        count = frozen_stages and 1 + sum(BLOCKS[self.module.depth][: frozen_stages - 1])
        return self.segments[:count], self.segments[count:]

    def trainable(self, tree: dict, frozen_stages: int) -> dict:
        """The entries of params or batch_stats that belong to trainable segments."""
        _, segments = self.split_frozen(frozen_stages)
        return {name: tree[name] for segment in segments for name in segment if name in tree}

    def init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[dict, dict]:
        """(params, batch_stats), float32 trees, for images of shape (H, W, 3)."""
        variables = self.module.init(key, jnp.zeros((1, *image_shape), jnp.float32), train=False)
        return sample_params(key, variables["params"]), variables["batch_stats"]

    def apply(
        self, params: dict, batch_stats: dict, images: jax.Array, *, train: bool, key: jax.Array | None = None
    ) -> tuple[jax.Array, dict]:
        """(logits [B, classes] float32, moments) of images [B, H, W, 3].

        moments: in training the structure of batch_stats with `mean` and `square` (mean square) of this batch; else {}. key:
        of drop-path in training; one for the batch, or [B], one for each image.
        """
        variables = {"params": params, "batch_stats": batch_stats}
        if not train:
            logits: Any = self.module.apply(variables, images, train=False)
            return logits, {}
        logits, changed = self.module.apply(variables, images, train=True, key=key, mutable=["moments"])
        return logits, changed["moments"]

    def apply_segment(
        self,
        params: dict,
        batch_stats: dict,
        x: jax.Array,
        *,
        segment: tuple[str, ...],
        train: bool = True,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, dict]:
        """(output of a segment for its input x, moments). params, batch_stats: whole trees or those of the segment."""
        variables = {"params": params, "batch_stats": batch_stats}
        if not train:
            y: Any = self.module.apply(variables, x, train=False, segment=segment)
            return y, {}
        y, changed = self.module.apply(variables, x, train=True, segment=segment, key=key, mutable=["moments"])
        return y, changed.get("moments", {})


Network = Model | RegisteredModel
EVERY_PLATFORM = "every platform"  # of `create`: the program chooses the fastest form when it is lowered
Tree = TypeVar("Tree")


def sample_params(key: jax.Array, stds: Tree) -> Tree:
    """Random initial parameters from a tree of standard deviations.

    Leaves of two or more dimensions are replaced by normal draws with those standard deviations; leaves of fewer dimensions
    (biases, scales) are returned unchanged.
    """
    leaves, structure = jax.tree.flatten(stds)
    weights = [index for index, leaf in enumerate(leaves) if leaf.ndim > 1]
    unit = jax.random.normal(key, (sum(leaves[index].size for index in weights),), jnp.float32)
    for index in weights:
        std = leaves[index]
        leaves[index] = std * unit[: std.size].reshape(std.shape)
        unit = unit[std.size :]
    return jax.tree.unflatten(structure, leaves)


def create(config: ModelConfig, platform: str | None = None) -> Network:
    """The network of a config. platform: resolves `convolution = "auto"`; None asks JAX for its default backend.

    Raises ConfigError for a name that is neither built in nor registered in this process.
    """
    build = MODELS.implementation(config.name)
    return build_registered(config) if config.name in MODELS.registered else build(config, platform)


def _create_resnet(config: ModelConfig, platform: str | None) -> Model:
    convolution: str = config.convolution
    if convolution == "auto":
        forms = {"cpu": "product", EVERY_PLATFORM: "by_platform"}
        convolution = forms.get(platform or jax.default_backend(), "direct")
    return Model(
        ResNet(
            depth=config.depth,
            classes=config.class_count,
            width=config.width,
            stem=config.stem,
            dtype=jnp.dtype(config.dtype),
            convolution=convolution,
            axes=AXES if config.norm == "synchronized" else (),
            remat=config.remat,
            custom_vjp=config.gradients == "custom_vjp",
            folds=config.resolved_batch_norm == "folded",
            squeeze_excitation=config.squeeze_excitation,
            blur_pool=config.blur_pool,
            classifier_bias=0.0 if config.classifier_bias == "zero" else -math.log(config.class_count),
            drop_path=config.drop_path,
        )
    )


MODELS.implement({RESNET: _create_resnet})


def check_image_size(config: ModelConfig, size: int, *, trained: int, field: str) -> None:
    """Raise ConfigError if a network for images of height and width `trained` cannot take those of `size`, set by `field`."""
    if trained == size:
        return
    model, images = create(config), jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    params, stats = jax.eval_shape(lambda: model.init(jax.random.key(0), (trained, trained, 3)))
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
    model = create(dataclasses.replace(config, convolution="direct"))
    params, stats = jax.eval_shape(lambda: model.init(jax.random.key(0), image_shape))
    trainable, trainable_stats = (model.trainable(tree, frozen_stages) for tree in (params, stats))
    sizes_by_name = {name: [math.prod(p.shape) for p in jax.tree.leaves(trainable[name])] for name in sorted(trainable)}
    sizes = [size for tensor_sizes in sizes_by_name.values() for size in tensor_sizes]
    mask = jax.tree.leaves(is_matrix_or_larger(trainable))

    def count(decayed: bool) -> dict:
        selected = [size for size, decays in zip(sizes, mask, strict=True) if decays == decayed]
        return {"tensors": len(selected), "parameters": sum(selected)}

    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda p, s, x: model.apply(p, s, x, train=False)[0])(params, stats, images)
    if isinstance(model, RegisteredModel):
        model.check_training(params, stats, image_shape)
    return {
        "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(params)),
        "sizes": sizes_by_name,
        "shapes": (params, stats),
        "trainable_shapes": (trainable, trainable_stats),
        "segments": model.split_frozen(frozen_stages)[1],
        "statistics": sum(math.prod(s.shape) for s in jax.tree.leaves(trainable_stats)),
        "macs": multiply_adds(jaxpr.jaxpr),
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
    model = create(dataclasses.replace(config, convolution="direct"))
    images = jax.ShapeDtypeStruct((batch, image_size, image_size, 3), jnp.float32)
    params, stats = jax.eval_shape(lambda: model.init(jax.random.key(0), images.shape[1:]))
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


def count_folded(config: ModelConfig, image_shape: tuple[int, int, int], *, batch: int, frozen_stages: int = 0) -> int:
    """The number of convolutions into which training folds batch normalization, with `batch` images of shape (H, W, 3)."""
    if config.name != RESNET or config.resolved_batch_norm != "folded":
        return 0
    model, folded = create(config), set()
    params, stats = jax.eval_shape(lambda: model.init(jax.random.key(0), image_shape))

    def record(method: Callable, arguments: tuple, keywords: dict, context: nn.module.InterceptorContext) -> Any:  # noqa: PLR0917
        result = method(*arguments, **keywords)
        if isinstance(result, Projection):
            folded.add(context.module.path)
        return result

    images = jax.ShapeDtypeStruct((batch, *image_shape), jnp.float32)
    with nn.intercept_methods(record):
        everywhere = PartitionSpec()
        mapped = jax.shard_map(  # for the axes of synchronized statistics
            lambda p, s, x: model.apply(p, s, x, train=True, key=jax.random.key(0))[0],
            mesh=abstract_mesh(1, 1),
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
        jax.eval_shape(mapped, params, stats, images)
    frozen = {name for segment in model.split_frozen(frozen_stages)[0] for name in segment}
    return sum(path[0] not in frozen for path in folded)


def multiply_adds(jaxpr: Jaxpr) -> int:
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
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += multiply_adds(inner)
    return total
