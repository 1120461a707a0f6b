"""A trained network as a StableHLO program that `jax.export.deserialize` reads without jaxdp.

The file is a serialized `jax.export.Exported`, followed by a zip archive of `metadata.json`. `jax.export` reads a file from its
beginning, and readers of zip archives from its end, so each ignores the other part.
"""

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax import export

from jaxdp import models
from jaxdp.choices import TASKS, kind_of_task
from jaxdp.config import RESNET
from jaxdp.data.datasets import pixel_stats
from jaxdp.errors import ConfigError, first_line
from jaxdp.inference.serving import LOGITS, PROBABILITIES, ServedModel
from jaxdp.training.evaluation import evaluation_logits

PLATFORMS = ("cpu", "cuda")
METADATA = "metadata.json"
LOCATIONS = "jax_traceback_in_locations_limit"


def to_stablehlo(served: ServedModel) -> bytes:
    """The content of a .jaxexport file: a function of uint8 [N, H, W, 3] for every N of at least 1.

    It returns {"probabilities", "logits"}, float32 [N, classes] each. Raises ConfigError for a registered model that cannot be
    exported.
    """
    data = io.BytesIO(_exported(served).serialize())
    with zipfile.ZipFile(data, "a") as archive:  # ZipInfo has a constant date, so that equal models are equal files
        archive.writestr(zipfile.ZipInfo(METADATA), json.dumps(served.metadata, indent=1, ensure_ascii=False))
    return data.getvalue()


def _exported(served: ServedModel) -> export.Exported:
    name, side = served.config.model.name, served.side
    images = jax.ShapeDtypeStruct(export.symbolic_shape(f"N, {side}, {side}, 3"), jnp.uint8)
    build = export.export(jax.jit(_classifier(served)), platforms=PLATFORMS)
    try:
        with _without_source_locations():
            return build(images)
    except Exception as error:
        if name == RESNET or isinstance(error, ConfigError):
            raise
        reason = f"the model cannot be exported to StableHLO: {type(error).__name__}: {first_line(error)}"
        raise ConfigError("model.name", name, reason=reason) from None


def _classifier(served: ServedModel) -> Callable[[jax.Array], dict[str, jax.Array]]:
    config, stats = served.config, pixel_stats(served.config)
    model = models.create(config.model, platform=models.EVERY_PLATFORM)

    def logits_of(images: jax.Array) -> jax.Array:
        return evaluation_logits(config, model, served.params, batch_stats=served.batch_stats, images=images, pixel_stats=stats)

    def classify(images: jax.Array) -> dict[str, jax.Array]:
        if config.model.name == RESNET:
            logits = logits_of(images)
        else:  # a registered model may need the number of images when it is traced, as `images.reshape(len(images), -1)` does
            logits = jax.vmap(lambda image: logits_of(image[None])[0])(images)
        if not kind_of_task(config.task):
            return {LOGITS: logits}
        return {PROBABILITIES: TASKS.implementation(config.task).probabilities(logits), LOGITS: logits}

    return classify


@contextmanager
def _without_source_locations() -> Iterator[None]:
    """Keep the paths of source files out of a program."""
    limit = getattr(jax.config, LOCATIONS)
    jax.config.update(LOCATIONS, 0)
    try:
        yield
    finally:
        jax.config.update(LOCATIONS, limit)
