"""`optimizer.class_weights`: the mean weight of the global batch divides the loss; `losses.py` weights each class."""

from collections.abc import Callable

from jax.typing import ArrayLike

from jaxdp.config import Config
from jaxdp.losses import label_weights
from jaxdp.training.objective import Batch, Gradient, LocalGradient, Loss
from jaxdp.training.state import TrainState


def with_class_weights(config: Config, gradient_of: LocalGradient, loss: Loss, *, mean: Callable[[dict], dict]) -> Gradient:
    """A factor of all weights cancels. The mean divides before the backward pass, as in PyTorch. mean: over all devices."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        weights = label_weights(config.optimizer, batch["labels"])  # [B]
        weight = mean({"label_weight": weights.mean()})["label_weight"]
        return gradient_of(lambda logits, examples: loss(logits, examples) / weight)(state, batch, seed)

    return gradient
