"""What training minimizes: the mean loss of one device's images, augmented and normalized for the network."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdp import metrics
from jaxdp.choices import TASKS
from jaxdp.config import Config
from jaxdp.data.augment import MODEL_KEY, PixelStat, augment, image_keys, mix, normalize, worker_key
from jaxdp.data.policies import change_pixels, erase
from jaxdp.losses import Mix
from jaxdp.metrics import METRICS
from jaxdp.network import Network
from jaxdp.training.state import TrainState

Batch = dict[str, Any]  # of arrays; the labels of a registered task may be a tree
PixelStats = tuple[PixelStat, PixelStat]  # mean and standard deviation, on the 0-255 scale


class Examples(NamedTuple):
    """Images as the network takes them in training, and what its loss compares with the logits."""

    images: jax.Array  # [B, H, W, 3] float32, augmented and normalized
    labels: Any  # int32 [B], or as the task has its targets
    mix: Mix | None  # labels of the images that were mixed in
    key: jax.Array  # of dropout and drop-path


Loss = Callable[[Any, Examples], jax.Array]  # (logits [B, K], examples) -> their mean loss, a scalar
Gradient = Callable[[TrainState, Batch, ArrayLike], tuple[dict, dict]]  # (state, batch, seed) -> (gradient, aux)
LocalGradient = Callable[[Loss], Gradient]
Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch, dict[str, jax.Array]], tuple[TrainState, Metrics]]  # (state, batch, hyperparameters)


def training_examples(config: Config, model: Network, batch: Batch, *, seed: ArrayLike, pixel_stats: PixelStats) -> Examples:
    """The examples of a batch: {"images" [B, S, S, 3] uint8, "labels" [B], "positions" [B]}."""
    x, labels, positions, mixed = batch["images"], batch["labels"], batch["positions"], None
    with jax.named_scope("augmentation"):
        x = augment(config, x, positions, seed=seed)  # [B, H, W, 3]
        x = change_pixels(config, x, positions, mean=pixel_stats[0], seed=seed)
        x = erase(config, normalize(x, *pixel_stats), positions, seed=seed)
        if config.data.mix != "none":
            x, partner, share = mix(config, x, positions, seed=seed)
            mixed = jax.tree.map(lambda rows: rows[partner], labels), share
    keys = image_keys if model.draws_for_each_image else worker_key
    return Examples(x, labels, mixed, keys(seed, positions, MODEL_KEY))


def mean_loss(config: Config, logits: Any, examples: Examples, *, constants: Any = None) -> jax.Array:
    """The mean over one device's images of the task's loss, `softmax` in `losses.py` by default: a scalar.

    logits: [B, classes], or as a registered task has its outputs. constants: of such a task.
    """
    loss = TASKS.implementation(config.task).loss
    given = {"mix": examples.mix, "images": examples.images, "constants": constants}
    return loss(config.optimizer, logits, examples.labels, **given).mean()


def batch_metrics(config: Config, logits: Any, examples: Examples) -> Metrics:
    """The first metric of the task over one device's images and their own labels, by its name without `eval_`, a scalar.

    {} if it needs all held-out images.
    """
    name = config.first_metric
    if METRICS[name].of == "all" or name == metrics.LOSS:
        return {}
    return {metrics.bare(name): METRICS.implementation(name)(logits, examples.labels).mean(dtype=jnp.float32)}
