"""Models as pure functions: `create` gives `init` and `apply`."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.config import RESNET
from jaxdp.config import Model as ModelConfig
from jaxdp.models.own import OwnModel, build
from jaxdp.models.resnet import BLOCKS, ResNet
from jaxdp.optim.lars import more_than_one_dimension
from jaxdp.parallel.mesh import AXES


@dataclass(frozen=True)
class Model:
    """A network without its numbers.

    init(key, image_shape) -> (params, batch_stats), float32 trees; image_shape: (H, W, 3).
    apply(params, batch_stats, images, train) -> (logits, moments): images [B, H, W, 3], logits [B, classes] float32; moments
    is {} in evaluation, in training batch_stats' structure with `mean` and `square` (the squared mean) of this batch.
    parts: the names of the parameters of each part of the network, in order; apply_part applies one of them alone.
    """

    module: Any

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        return self.module.parts

    def divided(self, frozen_stages: int):
        """(frozen parts, trained parts). frozen_stages: 0 for none, 1 for the stem, 2 with the first stage, and so on."""
        count = frozen_stages and 1 + sum(BLOCKS[self.module.depth][: frozen_stages - 1])
        return self.parts[:count], self.parts[count:]

    def trained(self, tree: dict, frozen_stages: int) -> dict:
        """What of params or batch_stats belongs to trained parts."""
        _, parts = self.divided(frozen_stages)
        return {name: tree[name] for part in parts for name in part if name in tree}

    def init(self, key, image_shape):
        variables = self.module.init(key, jnp.zeros((1, *image_shape)), train=False)
        return drawn(key, variables["params"]), variables["batch_stats"]

    def apply(self, params, batch_stats, images, train: bool):
        variables = {"params": params, "batch_stats": batch_stats}
        if not train:
            return self.module.apply(variables, images, train=False), {}
        logits, changed = self.module.apply(variables, images, train=True, mutable=["moments"])
        return logits, changed["moments"]

    def apply_part(self, part: tuple[str, ...], params, batch_stats, x, train: bool = True):
        """(what the part makes of x, its moments). params, batch_stats: whole trees or those of the part."""
        variables = {"params": params, "batch_stats": batch_stats}
        if not train:
            return self.module.apply(variables, x, train=False, part=part), {}
        y, changed = self.module.apply(variables, x, train=True, part=part, mutable=["moments"])
        return y, changed.get("moments", {})


def drawn(key, spreads):
    """Random initial parameters: normal draws in place of the leaves of two and more dimensions of `spreads`, which are their
    standard deviations; leaves of fewer dimensions (biases, scales) as they are."""
    leaves, structure = jax.tree.flatten(spreads)
    weights = [place for place, leaf in enumerate(leaves) if leaf.ndim > 1]
    unit = jax.random.normal(key, (sum(leaves[place].size for place in weights),))
    for place in weights:
        spread = leaves[place]
        leaves[place] = spread * unit[: spread.size].reshape(spread.shape)
        unit = unit[spread.size :]
    return jax.tree.unflatten(structure, leaves)


def create(config: ModelConfig, platform: str | None = None) -> Model | OwnModel:
    """The model of a config. platform: for `convolution = "auto"`; None asks JAX for its default backend.

    Raises ConfigError for a model that is neither jaxdp's nor registered in this process.
    """
    if config.name != RESNET:
        return build(config)
    form = config.convolution
    if form == "auto":
        form = "product" if (platform or jax.default_backend()) == "cpu" else "direct"
    return Model(
        ResNet(
            depth=config.depth,
            classes=config.classes,
            width=config.width,
            stem=config.stem,
            dtype=jnp.dtype(config.dtype),
            form=form,
            axes=AXES if config.norm == "synchronised" else (),
            remat=config.remat,
            own_gradients=config.gradients == "own",
        )
    )


def summary(config: ModelConfig, image_shape, frozen_stages: int = 0) -> dict:
    """From a trace: parameters and multiply-adds of one image; of the trained parts the statistics, and the tensors with and
    without decay and trust ratio."""
    model = create(dataclasses.replace(config, convolution="direct"))
    params, stats = jax.eval_shape(lambda: model.init(jax.random.key(0), tuple(image_shape)))
    trained = model.trained(params, frozen_stages)
    by_name = {name: [math.prod(p.shape) for p in jax.tree.leaves(trained[name])] for name in sorted(trained)}
    sizes = [size for some in by_name.values() for size in some]
    mask = jax.tree.leaves(more_than_one_dimension(trained))

    def counted(adapted: bool) -> dict:
        chosen = [size for size, adapts in zip(sizes, mask, strict=True) if adapts == adapted]
        return {"tensors": len(chosen), "parameters": sum(chosen)}

    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda p, s, x: model.apply(p, s, x, train=False)[0])(params, stats, images)
    return {
        "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(params)),
        "sizes": by_name,
        "parts": model.divided(frozen_stages)[1],
        "statistics": sum(math.prod(s.shape) for s in jax.tree.leaves(model.trained(stats, frozen_stages))),
        "macs": multiply_adds(jaxpr.jaxpr),
        "adapted": counted(True),
        "skipped": counted(False),
    }


def multiply_adds(jaxpr) -> int:
    """Multiply-adds of the convolutions and matrix products in a jaxpr, padding counted as the literature counts it."""
    total = 0
    for equation in jaxpr.eqns:
        shape = equation.outvars[0].aval.shape if equation.outvars else ()
        if equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out_channel = equation.params["dimension_numbers"].rhs_spec[0]
            total += math.prod(shape) * math.prod(kernel) // kernel[out_channel]
        elif equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            total += math.prod(shape) * math.prod(equation.invars[0].aval.shape[i] for i in contracted)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += multiply_adds(inner)
    return total
