"""A registered model behind the interface of `jaxdp.models.Model`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.config import ConfigError
from jaxdp.config import Model as ModelConfig
from jaxdp.registry import check_model, own_models


@dataclass(frozen=True)
class OwnModel:
    """net: what the registered function gave. It is one part: its whole gradient sets off when the backward pass is done."""

    net: Any
    name: str
    classes: int

    parts = (("net",),)

    def divided(self, frozen_stages: int):
        """(frozen parts, trained parts): it has no stages, of which the first could be frozen."""
        return (), self.parts

    def trained(self, tree: dict, frozen_stages: int) -> dict:
        return tree

    def init(self, key, image_shape):
        params, batch_stats = self.net.init(key, image_shape)
        return _float32({"net": params}), _float32(batch_stats)

    def apply(self, params, batch_stats, images, train: bool):
        logits, moments = self.net.apply(params["net"], batch_stats, images, train)
        if logits.shape != (len(images), self.classes):
            raise ConfigError(
                f"model.name: {self.name!r} is not allowed; its logits have the shape {logits.shape} for {len(images)} images; "
                f"give [B, classes], which is {(len(images), self.classes)}"
            )
        if train and _places(moments) != _places(batch_stats, var="square"):
            raise ConfigError(
                f"model.name: {self.name!r} is not allowed; its moments {_places(moments)} are not those of its batch_stats; "
                f"give {_places(batch_stats, var='square')} in training"
            )
        return logits.astype(jnp.float32), moments if train else {}

    def apply_part(self, part, params, batch_stats, x, train: bool = True):
        return self.apply(params, batch_stats, x, train)


def build(config: ModelConfig) -> OwnModel:
    """The registered model of a config. Raises ConfigError where none of that name is."""
    check_model(config.name)
    net = own_models[config.name](config)
    for method in ("init", "apply"):
        if not callable(getattr(net, method, None)):
            raise ConfigError(
                f"model.name: {config.name!r} is not allowed; what its function gives has no method {method}; see "
                "jaxdp.register_model"
            )
    return OwnModel(net, config.name, config.classes)


def _float32(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def _places(tree, **renamed: str) -> list[str]:
    """The names of a tree's leaves, a last part being renamed."""
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]
    return sorted("/".join([*parts, renamed.get(last, last)]) for *parts, last in (name.split("/") for name in names))
