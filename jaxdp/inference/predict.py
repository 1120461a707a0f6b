"""Predicting the most likely classes of images with a trained run."""

import dataclasses
import os
from collections.abc import Sequence
from contextlib import closing
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxdp.choices import TASKS, kind_of_task
from jaxdp.config import Config, Mesh, Preprocessing
from jaxdp.data import prefetch
from jaxdp.data.batch_sources import DecodedImages
from jaxdp.data.datasets import pixel_stats, prediction_loader
from jaxdp.data.decode import read_image
from jaxdp.errors import ConfigError, one_of
from jaxdp.files import expand_user
from jaxdp.inference.load_run import WEIGHTS, inference_batch, load_run, load_weights, weights_config
from jaxdp.inference.outputs import OUTPUTS, PROBABILITIES, network_of
from jaxdp.models import preprocessing
from jaxdp.models.summary import check_image_size
from jaxdp.parallel.mesh import AXES
from jaxdp.setup.run_dir import class_names, run_config
from jaxdp.training.evaluation import evaluation_logits
from jaxdp.training.objective import Batch, PixelStats
from jaxdp.xla.jax_options import jaxdp_jax_config

DEFAULT_TOP, THRESHOLD = 5, 0.5
PATH_TYPES = (str, os.PathLike)


class Predictions(NamedTuple):
    """The most likely classes of N images, most likely first.

    classes: int32 [N, top]. names: N lists of `top` class names. probabilities: float32 [N, top]. scores: the probabilities of
    all classes in their order, float32 [N, C]. present: for the task labels, N lists of the names of the labels whose
    probability reaches the threshold, most likely first; else None.

    Of a registered task with its own targets, `scores` are the outputs, [N, ...] or a tree; `names` has N lists of one text,
    the output as people see it; the others are empty.
    """

    classes: np.ndarray
    names: list[list[str]]
    probabilities: np.ndarray
    scores: Any
    present: list[list[str]] | None


class Wanted(NamedTuple):
    """What is predicted: see `predict`."""

    top: int | None = None
    threshold: float | None = None
    output: str = PROBABILITIES
    flip: bool = False


DEFAULTS = Wanted()


class SourcePredictions(NamedTuple):
    """Predictions for all images of a source.

    predictions: rows of unusable images have class -1, no names and NaN. bad_images: name -> reason of these. checkpoint: path,
    samples and epoch of the checkpoint, by name. class_names: of all classes. threshold: None if images have one class each.
    """

    predictions: Predictions
    bad_images: dict[str, str]
    checkpoint: dict[str, Any]
    class_names: list[str]
    threshold: float | None


def predict(
    workdir: str | Path,
    images: Any,
    checkpoint: str | int = "result",
    *,
    top: int | None = None,
    threshold: float | None = None,
    output: str = "probabilities",
    flip: bool = False,
) -> Predictions | Any:
    """Predict the most likely classes of images with a checkpoint of the run in `workdir`.

    images: uint8 [N, H, W, 3], or [N, H, W] or [N, H, W, 1] (grayscale), of NumPy, JAX or PyTorch; the path of an image; or a
    list of paths, Pillow images or uint8 arrays [H, W, 3] or [H, W] of any sizes. They are resized and cropped as in the run's
    evaluation. checkpoint: result (the newest, or with early stopping the best), newest, best, or its number of samples. top:
    number of classes per image (default: 5, or all if there are fewer). threshold: for the task labels, the probability from
    which a label is present (default: 0.5). output: "logits" returns an array [N, C] in place of `Predictions`, or the outputs
    of a registered task; "features" the input of the classifier, [N, D]; both float32. flip: outputs are the mean over an image
    and its mirror image.

    Raises ConfigError if the run, the checkpoint or an image cannot be used, or if a probability is not finite.
    """
    wanted = Wanted(top, threshold, output, flip)
    found = predict_source(workdir, Images(_as_list(images)), str(checkpoint), wanted=wanted)
    for name, reason in found.bad_images.items():
        raise ConfigError(name, reason=reason)
    return found.predictions if output == PROBABILITIES else found.predictions.scores


def _as_list(images: Any) -> list:
    """The images of an array, an iterable or a path. Raises ConfigError for other types and shapes."""
    if isinstance(images, PATH_TYPES):
        return [images]
    kind = type(images).__name__
    try:
        if hasattr(images, "shape"):
            images = np.asarray(images)
            kind = f"{images.dtype} array of shape {images.shape}"
            gray = images.ndim == 3 and images.shape[2] > 4  # otherwise it is one image [H, W, channels]
            if images.dtype == np.uint8 and (gray or (images.ndim == 4 and images.shape[3] in (1, 3))):
                return list(images)
        elif not isinstance(images, (bytes, dict)):
            return list(images)
    except (TypeError, RuntimeError):  # not iterable, or a PyTorch tensor on another device
        pass
    hint = "use uint8 [N, H, W, 3] or [N, H, W], a path, or a list of paths, Pillow images or uint8 [H, W, 3]"
    raise ConfigError("images", reason=f"unsupported type: {kind}", hint=hint)


class Images:
    """Images in memory, and files by path, as a source for `DecodedImages`. All labels are 0."""

    def __init__(self, images: Sequence[Any]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        if not isinstance(image, PATH_TYPES):
            return image, 0
        return read_image(expand_user(image, "images")), 0

    def name(self, index: int) -> str:
        image = self.images[index]
        return str(image) if isinstance(image, PATH_TYPES) else f"images[{index}]"


@jaxdp_jax_config()
def predict_source(
    workdir: str | Path, source: Any, checkpoint: str = "result", *, wanted: Wanted = DEFAULTS
) -> SourcePredictions:
    """Predict the most likely classes of all images of a source; unusable images are reported instead of raised.

    source: as for `DecodedImages`; its labels are ignored. Other arguments and errors as for `predict`.
    """
    config = run_config(workdir)
    names = class_names(workdir, config.model.class_count)
    wanted = _checked(config, source, names, wanted=wanted)
    single_mesh = dataclasses.replace(config, mesh=Mesh(cpu_devices=config.mesh.cpu_devices))  # not the mesh it was trained on
    state, config, manifest = load_run(workdir, checkpoint, single_mesh)
    about = {"checkpoint": manifest.location, "samples": manifest.samples, "epoch": manifest.epoch}
    return _predict_source(config, state.eval_variables, source, names=names, wanted=wanted, about=about)


@jaxdp_jax_config()
def predict_weights(
    path: str | Path,
    source: Any,
    *,
    given: Preprocessing | None = None,
    blur_pool: str = "none",
    wanted: Wanted = DEFAULTS,
) -> tuple[SourcePredictions, str]:
    """Predict the most likely classes of all images of a source with a safetensors file of ResNet weights.

    given: preprocessing that replaces what the file states. blur_pool: `model.blur_pool` of the network, for a file that does
    not state it. Classes have numbers for names, unless the file names them. Other arguments as for `predict_source`.
    Returns (predictions, the file's content and preprocessing in one line). Raises ConfigError if the file cannot be used or
    states another BlurPool, and as `predict` does.
    """
    config = weights_config(path, given, blur_pool=blur_pool)
    if blur_pool not in ("none", config.model.blur_pool):
        reason = f"{str(path)!r} states BlurPool {config.model.blur_pool!r}"
        raise ConfigError("--model.blur-pool", blur_pool, reason=reason, hint="omit it")
    names = (preprocessing.classes_of(path, WEIGHTS) or [])[: config.model.class_count]
    names += [f"class {number}" for number in range(len(names), config.model.class_count)]
    wanted = _checked(config, source, names, wanted=wanted)
    loaded = load_weights(path, config)
    about = {"checkpoint": str(path)}
    return _predict_source(loaded.config, loaded.eval_variables, source, names=names, wanted=wanted, about=about), loaded.words


def _checked(config: Config, source: Any, names: list[str], *, wanted: Wanted) -> Wanted:
    """What is wanted, with defaults. Raises ConfigError for a value out of range, for a threshold where images have one class
    each, and for a source without images."""
    top, threshold = wanted[:2]
    if wanted.output not in OUTPUTS:
        raise one_of("output", wanted.output, OUTPUTS)
    if not kind_of_task(config.task) or wanted.output != PROBABILITIES:
        TASKS.check(config.task)
        of = f"output={wanted.output!r}" if kind_of_task(config.task) else f"task={config.task!r}"
        for flag, value in (("--top", top), ("--threshold", threshold)):
            if value is not None:
                raise ConfigError(flag, value, reason=f"not possible with {of}", hint="omit it")
        is_own = wanted.output == "logits" and not kind_of_task(config.task)  # which has no probabilities, but its outputs
        return wanted._replace(output=PROBABILITIES) if is_own else wanted
    top = min(DEFAULT_TOP, len(names)) if top is None else top
    if not isinstance(top, (int, np.integer)) or not 1 <= top <= len(names):
        raise ConfigError("--top", top, reason=f"must be an integer from 1 to {len(names)}, the number of classes")
    if not len(source):
        raise ConfigError("images", reason="no images given", hint="give at least one")
    if kind_of_task(config.task) == "labels":
        threshold = THRESHOLD if threshold is None else threshold
    elif threshold is not None:
        raise ConfigError("--threshold", threshold, reason=f"not possible with task={config.task!r}", hint="omit it")
    if threshold is not None and not (isinstance(threshold, (int, float, np.number)) and 0 <= threshold <= 1):
        raise ConfigError("--threshold", threshold, reason="must be a probability from 0 to 1")
    return wanted._replace(top=int(top), threshold=threshold)


def _predict_source(
    config: Config, evaluated: tuple[dict, dict], source: Any, *, names: list[str], wanted: Wanted, about: dict[str, Any]
) -> SourcePredictions:
    """Predictions of (params, batch_stats) on the devices. wanted: of `_checked`. Raises ConfigError if they are not finite."""
    loader, (top, threshold) = prediction_loader(config, source), wanted[:2]
    scores, usable = _scores(config, evaluated, loader, wanted=wanted)
    if not all(np.isfinite(part[usable]).all() for part in jax.tree.leaves(scores)):
        path = Path(about["checkpoint"])
        reason = f"the {wanted.output} predicted by {path} are not finite"
        raise ConfigError("--checkpoint", path.name, reason=reason, hint="use another checkpoint")
    for part in jax.tree.leaves(scores):
        part[~usable] = np.nan
    if top is None:
        texts = _texts(config, scores, usable) if wanted.output == PROBABILITIES else []
        empty = np.zeros((len(usable), 0), np.float32)
        predictions = Predictions(empty.astype(np.int32), texts, empty, scores, None)
        return SourcePredictions(predictions, loader.bad_images, about, names, threshold)
    order = np.argsort(-scores, axis=-1, kind="stable").astype(np.int32)
    classes = np.where(usable[:, None], order[:, :top], -1)
    probabilities = np.take_along_axis(scores, order[:, :top], axis=-1)
    present = None
    if threshold is not None:
        present = [[names[k] for k in ks if row[k] >= threshold] for ks, row in zip(order, scores, strict=True)]
    of_rows = [[names[k] for k in row if k >= 0] for row in classes]
    predictions = Predictions(classes, of_rows, probabilities, scores, present)
    return SourcePredictions(predictions, loader.bad_images, about, names, threshold)


def _texts(config: Config, outputs: Any, usable: np.ndarray) -> list[list[str]]:
    """The outputs of a registered task as people see them, one text for each usable image."""
    show = TASKS.implementation(config.task).shown
    return [[show(jax.tree.map(itemgetter(row), outputs))] if ok else [] for row, ok in enumerate(usable)]


def make_prediction_step(
    config: Config, mesh: jax.sharding.Mesh, *, pixel_stats: PixelStats, wanted: Wanted = DEFAULTS
) -> jax.stages.Wrapped:
    """step(params, batch_stats, batch) -> what is wanted of each image, such as probabilities float32 [B, C].

    batch: as for `make_evaluation_step`.
    """
    model = network_of(config, output=wanted.output, flip=wanted.flip)
    shown = TASKS.implementation(config.task).probabilities if wanted.output == PROBABILITIES else lambda outputs: outputs

    def step(params: dict, batch_stats: dict, batch: Batch) -> Any:
        images = batch["images"]
        return shown(evaluation_logits(config, model, params, batch_stats=batch_stats, images=images, pixel_stats=pixel_stats))

    replicated, sharded = PartitionSpec(), PartitionSpec(AXES)
    in_specs = (replicated, replicated, sharded)
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=sharded))


def _scores(config: Config, evaluated: tuple[dict, dict], loader: DecodedImages, *, wanted: Wanted) -> tuple[Any, np.ndarray]:
    """(probabilities float32 [N, C], or other outputs; usable bool [N]: whether the image could be decoded)."""
    check_image_size(config.model, config.data.evaluated_size, trained=config.data.image_size, field="data.eval_size")
    params, batch_stats = evaluated
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    step = make_prediction_step(config, mesh, pixel_stats=pixel_stats(config), wanted=wanted)
    (images, rows), parts = inference_batch(len(loader), mesh), []
    with closing(prefetch.evaluation_prefetcher(loader, batch_size=images, rows=np.arange(rows))) as batches:
        for batch in iter(batches.next, None):
            scores, seen = jax.device_get(step(params, batch_stats, prefetch.to_global(batch, mesh))), batch["seen"] > 0
            parts.append(jax.tree.map(lambda array, seen=seen: array[seen], (scores, batch["weights"] > 0)))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
