"""A trained network with its preprocessing, for programs without jaxdp: what the formats for serving have in common."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxdp import __version__
from jaxdp.config import RESNET, Config
from jaxdp.data.datasets import pixel_stats
from jaxdp.data.host_crops import evaluation_sides
from jaxdp.errors import ConfigError
from jaxdp.inference.load_run import LoadedRun
from jaxdp.metrics import bare
from jaxdp.models import preprocessing, weights
from jaxdp.models.summary import check_image_size
from jaxdp.setup.run_dir import class_names

IMAGES, PROBABILITIES, LOGITS = "images", "probabilities", "logits"  # names of the input and of the outputs
MOST_BYTES = 2**31 - 2**24  # of the weights: protocol buffers and flat buffers end at 2 GiB


class ServedModel(NamedTuple):
    """What a file for serving contains.

    config: the run's, with the dtype of the file; params, batch_stats: float32 host arrays, as evaluation uses them; metadata:
    JSON values that travel with the file, see docs/weights.md.
    """

    config: Config
    params: dict
    batch_stats: dict
    metadata: dict[str, Any]

    @property
    def side(self) -> int:
        """Height and width of the images that a client gives, in pixels."""
        return evaluation_sides(self.config)[1]


def served_model(workdir: str | Path, loaded: LoadedRun, *, format: str, dtype: str) -> ServedModel:
    """The network of a run in evaluation mode. format: of `jaxdp.inference.export`; dtype: of activations.

    Raises ConfigError if it cannot take images of the evaluated size, or if its weights are larger than 2 GiB.
    """
    changed: dict[str, Any] = {"dtype": dtype}
    if loaded.config.model.name == RESNET:
        changed |= {"remat": False}
    config = dataclasses.replace(loaded.config, model=dataclasses.replace(loaded.config.model, **changed))
    size, trained = config.data.evaluated_size, config.data.image_size
    check_image_size(config.model, size, trained=trained, field="data.eval_size")
    params, batch_stats = jax.device_get(loaded.state.eval_variables)
    tensors = weights.named_tensors(params, batch_stats)
    if (num_bytes := sum(tensor.nbytes for tensor in tensors.values())) > MOST_BYTES:
        reason = f"the weights have {num_bytes:,} bytes, and a file of this format at most 2 GiB"
        raise ConfigError("--format", format, reason=reason, hint="use jaxdp")
    manifest, name = loaded.manifest, config.first_metric
    metadata = {
        "jaxdp_version": __version__,
        "recipe": config.name,
        "task": config.task,
        "network": config.model.title,
        "class_names": class_names(workdir, config.model.class_count),
        **_preprocessing(config),
        "dtype": dtype,
        "samples": manifest.samples,
        "epoch": manifest.epoch,
        bare(name): manifest.evaluation.get(name),
        "weights_digest": weights.digest_of(tensors),
    }
    return ServedModel(config, params, batch_stats, metadata)


def _preprocessing(config: Config) -> dict[str, dict[str, Any]]:
    """The part of the preprocessing that is left to the client, and the part that the file includes."""
    short_side, side = evaluation_sides(config)
    included = preprocessing.of_run(config, *pixel_stats(config))
    steps: dict[str, Any] = {"resize_short_side": short_side, "center_crop": side}
    if config.data.eval_interpolation == "area":
        steps = {"center_crop_share": config.data.evaluation_share, "resize": side}
    return {
        "client_preprocessing": {"color": "RGB", "interpolation": config.data.eval_filter} | steps,
        "included_preprocessing": {
            "image_size": config.data.evaluated_size,
            "mean": list(included.mean),
            "std": list(included.std),
        },
    }
