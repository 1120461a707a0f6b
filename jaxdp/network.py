"""What a training step needs of a network; `jaxdp.models.create` builds one."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

ROOT = "net"  # first part of the name of every parameter of a registered model


class Network(Protocol):
    """A network without its parameters: a sequence of segments, each a tuple of names of parameters.

    The segments of a ResNet are its stem, every block and its head.
    """

    @property
    def segments(self) -> tuple[tuple[str, ...], ...]:
        """Parameter names of each segment, in forward order."""

    @property
    def draws_for_each_image(self) -> bool:
        """Whether the key of a step is one for each image, as for drop-path, not one for the batch."""

    def split_frozen(self, frozen_stages: int) -> tuple[tuple, tuple]:
        """(frozen segments, trainable segments). frozen_stages: 0 none, 1 the stem, 2 also the first ResNet stage, ..."""

    def trainable(self, tree: dict, frozen_stages: int) -> dict:
        """The entries of params or batch_stats that belong to trainable segments."""

    def init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[dict, dict]:
        """(params, batch_stats), float32 trees, for images of shape (H, W, 3)."""

    def apply(
        self, params: dict, batch_stats: dict, images: jax.Array, *, train: bool, key: jax.Array | None = None
    ) -> tuple[jax.Array, dict]:
        """(logits [B, classes] float32, moments) of images [B, H, W, 3].

        moments: in training, for each {"mean", "var"} of batch_stats, the {"mean", "square"} of this batch: its mean and mean
        square; else {}.
        key: of dropout and drop-path in training; one for the batch, or [B], one for each image.
        """

    def apply_segment(
        self,
        params: dict,
        batch_stats: dict,
        x: Any,
        *,
        segment: tuple[str, ...],
        train: bool = True,
        key: jax.Array | None = None,
    ) -> tuple[Any, dict]:
        """(output of a segment for its input x, moments). params, batch_stats: whole trees, or of the segment."""


def apply_in_segments(  # noqa: PLR0917 - the arguments of `Network.apply`
    network: Any, params: dict, batch_stats: dict, images: jax.Array, *, train: bool, key: jax.Array | None
) -> tuple[jax.Array, dict]:
    """`Network.apply` of a network by `apply_segment` of each of its segments."""
    x: Any = images
    moments: dict[str, Any] = {}
    for segment in network.segments:
        x, new = network.apply_segment(params, batch_stats, x, segment=segment, train=train, key=key)
        moments |= new
    return x, moments


@dataclass(frozen=True)
class FrozenStages:
    """Fine-tuning with `finetune.frozen_stages`: the rest of a network, on the features of its frozen stages.

    The frozen stages compute as in evaluation, and no derivative passes into them.
    """

    model: Network
    stages: int

    @property
    def segments(self) -> tuple[tuple[str, ...], ...]:
        """The trained segments; the first one takes images."""
        return self.model.split_frozen(self.stages)[1]

    def apply(
        self, params: dict, batch_stats: dict, images: jax.Array, *, train: bool, key: jax.Array | None = None
    ) -> tuple[jax.Array, dict]:
        """`Network.apply`; moments of the trained segments alone."""
        return apply_in_segments(self, params, batch_stats, images, train=train, key=key)

    def apply_segment(
        self,
        params: dict,
        batch_stats: dict,
        x: Any,
        *,
        segment: tuple[str, ...],
        train: bool = True,
        key: jax.Array | None = None,
    ) -> tuple[Any, dict]:
        """`Network.apply_segment` of a trained segment."""
        frozen, trained = self.model.split_frozen(self.stages)
        if segment == trained[0]:
            for each in frozen:
                x, _ = self.model.apply_segment(params, batch_stats, x, segment=each, train=False)
            x = jax.lax.stop_gradient(x)
        return self.model.apply_segment(params, batch_stats, x, segment=segment, train=train, key=key)


class InitialValues(NamedTuple):
    """Arrays that replace values drawn from the seed, by names such as params/conv1/kernel, and a line about them."""

    tensors: dict[str, Any]
    description: str
