"""Networks around a trained one: its features in place of logits, and the mean over an image and its mirror image."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxdp.config import Config
from jaxdp.errors import ConfigError
from jaxdp.models import create
from jaxdp.network import Network

PROBABILITIES = "probabilities"
OUTPUTS = (PROBABILITIES, "logits", "features")


@dataclass(frozen=True)
class Features:
    """The input of the last segment in place of logits, [B, D] float32; the mean of maps [B, H, W, D] and tokens [B, T, D]."""

    model: Network

    def apply(self, params: dict, batch_stats: dict, images: jax.Array, *, train: bool) -> tuple[Any, dict]:
        x: Any = images
        for segment in self.model.segments[:-1]:
            x, _ = self.model.apply_segment(params, batch_stats, x, segment=segment, train=train)
        return jax.tree.map(lambda part: part.astype("float32").mean(tuple(range(1, part.ndim - 1))), x), {}


@dataclass(frozen=True)
class MirrorMean:
    """The mean of a network's outputs for each image and for its mirror image."""

    model: Network | Features

    def apply(self, params: dict, batch_stats: dict, images: jax.Array, *, train: bool) -> tuple[Any, dict]:
        of_images, of_mirrored = (
            self.model.apply(params, batch_stats, x, train=train)[0] for x in (images, images[:, :, ::-1])
        )
        return jax.tree.map(lambda one, other: (one + other) / 2, of_images, of_mirrored), {}


def network_of(config: Config, *, output: str = "logits", flip: bool = False) -> Any:
    """The network of a config with an output of OUTPUTS; see `MirrorMean` for flip. Only its method `apply` is for use.

    Raises ConfigError for features of a model without stages.
    """
    network: Any = create(config.model)
    if output == "features":
        if len(network.segments) == 1:
            hint = "give the module a method stages() whose last item is the classifier"
            raise ConfigError("output", output, reason=f"the model {config.model.name!r} has no stages", hint=hint)
        network = Features(network)
    return MirrorMean(network) if flip else network
