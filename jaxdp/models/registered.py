"""Adapter that gives a registered model the interface of `jaxdp.models.Model`."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxdp.config import Model as ModelConfig
from jaxdp.errors import ConfigError, plural
from jaxdp.registry import check_model, own_models


@dataclass(frozen=True)
class RegisteredModel:
    """A registered model as a single segment: its whole gradient is reduced after its backward pass.

    net: the object that the registered function returned; name: as registered; classes: number of logits.
    """

    net: Any
    name: str
    classes: int

    segments: ClassVar[tuple[tuple[str, ...], ...]] = (("net",),)

    def split_frozen(self, frozen_stages: int) -> tuple[tuple, tuple]:
        """(frozen segments, trainable segments): nothing is frozen, because only a ResNet has stages."""
        return (), self.segments

    def trainable(self, tree: dict, frozen_stages: int) -> dict:
        """The trainable part of params or batch_stats: all of it."""
        return tree

    def init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[dict, dict]:
        """(params, batch_stats) as float32 trees; see `jaxdp.register_model`."""
        params, batch_stats = self.net.init(key, image_shape)
        return _float32({"net": params}), _float32(batch_stats)

    def apply(self, params: dict, batch_stats: dict, images: jax.Array, *, train: bool) -> tuple[jax.Array, dict]:
        """(logits [B, classes] float32, moments) of images [B, H, W, 3].

        Raises ConfigError if the model returns logits of another shape, or moments of other layers than batch_stats.
        """
        logits, moments = self.net.apply(params["net"], batch_stats, images, train)
        expected = len(images), self.classes
        if logits.shape != expected:
            raise ConfigError(
                "model.name",
                self.name,
                reason=f"the model returns logits of shape {logits.shape} for {plural(len(images), 'image')}",
                hint=f"return [B, classes] = {expected}",
            )
        if train and _leaf_names(moments) != (names := _leaf_names(batch_stats, var="square")):
            raise ConfigError(
                "model.name",
                self.name,
                reason=f"the model returns moments {_leaf_names(moments)}, which do not match its batch_stats",
                hint=f"return {names} in training",
            )
        return logits.astype(jnp.float32), moments if train else {}

    def apply_segment(
        self, params: dict, batch_stats: dict, x: jax.Array, *, segment: tuple[str, ...], train: bool = True
    ) -> tuple[jax.Array, dict]:
        """The same as `apply`: there is one segment."""
        return self.apply(params, batch_stats, x, train=train)


def build_registered(config: ModelConfig) -> RegisteredModel:
    """The registered model of a config. Raises ConfigError for an unknown name, or an object without init and apply."""
    check_model(config.name)
    net = own_models[config.name](config)
    for method in ("init", "apply"):
        if not callable(getattr(net, method, None)):
            reason = f"the object that the registered function returns has no method {method!r}"
            raise ConfigError("model.name", config.name, reason=reason, hint="see jaxdp.register_model")
    return RegisteredModel(net, config.name, config.classes)


def _float32(tree: dict) -> dict:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def _leaf_names(tree: dict, **renamed: str) -> list[str]:
    """Sorted paths of a tree's leaves. renamed: replacements for the last component."""
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]
    return sorted("/".join([*parents, renamed.get(last, last)]) for *parents, last in (name.split("/") for name in names))
