"""Networks as pure functions (`create` returns a `Network`), their batch normalization, and weight files."""

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxdp.choices import MODELS
from jaxdp.config import Model
from jaxdp.models.convolution import EVERY_PLATFORM as EVERY_PLATFORM
from jaxdp.models.convolution import form_on
from jaxdp.models.resnet import BLOCKS, ResNet
from jaxdp.network import Network
from jaxdp.parallel.mesh import AXES


@dataclass(frozen=True)
class ResNetModel:
    """A ResNet as a `Network`; see there for the methods."""

    module: ResNet

    @property
    def segments(self) -> tuple[tuple[str, ...], ...]:
        return self.module.segments

    @property
    def draws_for_each_image(self) -> bool:
        return self.module.drop_path > 0

    def split_frozen(self, frozen_stages: int) -> tuple[tuple, tuple]:
        count = frozen_stages and 1 + sum(BLOCKS[self.module.depth][: frozen_stages - 1])
        return self.segments[:count], self.segments[count:]

    def trainable(self, tree: dict, frozen_stages: int) -> dict:
        _, segments = self.split_frozen(frozen_stages)
        return {name: tree[name] for segment in segments for name in segment if name in tree}

    def init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[dict, dict]:
        return init_resnet(self.module.clone(convolution="direct"), key, image_shape)

    def apply(
        self, params: dict, batch_stats: dict, images: jax.Array, *, train: bool, key: jax.Array | None = None
    ) -> tuple[jax.Array, dict]:
        return self.apply_segment(params, batch_stats, images, segment=None, train=train, key=key)

    def apply_segment(
        self,
        params: dict,
        batch_stats: dict,
        x: jax.Array,
        *,
        segment: tuple[str, ...] | None,
        train: bool = True,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, dict]:
        """(output of a segment for its input x, moments). segment: None for the whole network."""
        variables = {"params": params, "batch_stats": batch_stats}
        if not train:
            y: Any = self.module.apply(variables, x, train=False, segment=segment)
            return y, {}
        y, changed = self.module.apply(variables, x, train=True, segment=segment, key=key, mutable=["moments"])
        return y, changed.get("moments", {})


@partial(jax.jit, static_argnums=(0, 2))
def init_resnet(module: ResNet, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[dict, dict]:
    """`ResNetModel.init` of a module, traced once for all programs of a run; it does not depend on the form of convolutions."""
    variables = module.init(key, jnp.zeros((1, *image_shape), jnp.float32), train=False)
    return sample_params(key, variables["params"]), variables["batch_stats"]


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


def create(config: Model, platform: str | None = None, *, custom_vjp: bool = True) -> Network:
    """The network of a config. platform: the devices' platform, for `form_on`; None: JAX's default backend. custom_vjp: use the
    hand-written gradients of a ResNet, which move less memory than JAX's.

    Raises ConfigError for a name that is neither built in nor registered in this process.
    """
    if config.name in MODELS.registered:
        from jaxdp.models.registered import build_registered  # imports flax.nnx, which takes as long as all other networks

        return build_registered(config)
    return MODELS.implementation(config.name)(config, platform, custom_vjp)


def _initial_shapes(model: Network, image_shape: tuple[int, int, int]) -> tuple[dict, dict]:
    """Shapes and dtypes of (params, batch_stats), without computing them. image_shape: (H, W, 3)."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0), image_shape))


initial_shapes: Any = lru_cache(4)(_initial_shapes)  # equal networks share a trace; mypy does not know that they can be hashed


def create_resnet(config: Model, platform: str | None, custom_vjp: bool) -> ResNetModel:
    return ResNetModel(
        ResNet(
            depth=config.depth,
            classes=config.class_count,
            width=config.width,
            stem=config.stem,
            shortcut=config.shortcut,
            dtype=jnp.dtype(config.dtype),
            convolution=form_on(platform),
            axes=AXES if config.norm == "synchronized" else (),
            remat=config.remat,
            custom_vjp=custom_vjp,
            folds=config.resolved_batch_norm == "folded",
            blur_pool=config.blur_pool,
            classifier_bias=0.0 if config.classifier_bias == "zero" else -math.log(config.class_count),
            drop_path=config.drop_path,
            draws=False,
        )
    )
