"""What a run's network makes of images: the likeliest classes, by name."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxdp import models
from jaxdp.config import Config, ConfigError, Mesh
from jaxdp.data import feed
from jaxdp.data.decode import ImageError
from jaxdp.data.sources import pixel_statistics, to_predict
from jaxdp.training.evaluation import make_prediction_step
from jaxdp.training.restored import batch_of, restored
from jaxdp.training.workdir import class_names, run_config

TOP = 5  # classes that are told, where as many are


class Predictions(NamedTuple):
    """The likeliest classes of N images, the likeliest first.

    classes: int32 [N, top]; names: theirs, N lists of `top`; probabilities: float32 [N, top].
    """

    classes: np.ndarray
    names: list[list[str]]
    probabilities: np.ndarray


def predict(workdir, images, checkpoint="newest", top: int | None = None) -> Predictions:
    """The likeliest classes of images, by a checkpoint of the run in `workdir`.

    images: uint8 [N, H, W, 3], of NumPy, JAX or PyTorch, or a list of uint8 [H, W, 3] (or [H, W], grey) of any sizes or of
    Pillow's images; they are resized and cropped as the run's evaluation does. checkpoint: newest, best, or its samples. top:
    None for 5, or all classes where there are fewer. Raises ConfigError for a run or checkpoint that is not there or gives no
    finite probabilities, and for images or a `top` that cannot be.
    """
    told, bad, _ = predict_from(workdir, _Given(_one_by_one(images)), checkpoint, top)
    if bad:
        name, reason = next(iter(bad.items()))
        raise ConfigError(f"images: {name} is not allowed: {reason}")
    return told


def _one_by_one(images) -> list:
    """The images of an array, or of a list. Raises ConfigError for what is neither, and for an array of another shape."""
    what = type(images).__name__
    try:
        if hasattr(images, "shape"):
            images = np.asarray(images)
            what = f"{images.dtype} of shape {images.shape}"
            if images.ndim == 4 and images.shape[3] == 3 and images.dtype == np.uint8:
                return list(images)
        elif not isinstance(images, (str, bytes, dict)):
            return list(images)
    except (TypeError, RuntimeError):  # what cannot be counted through, or lies on another device
        pass
    raise ConfigError(f"images: {what} is not allowed; give uint8 [N, H, W, 3], or a list of [H, W, 3]")


class _Given:
    def __init__(self, images: list):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], 0

    def name(self, index) -> str:
        return f"images[{index}]"


class Files:
    """Encoded images by their paths."""

    def __init__(self, paths: list[str]):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        try:
            with open(self.paths[index], "rb") as file:
                return file.read(), 0
        except OSError as error:
            raise ImageError(error.strerror) from None

    def name(self, index) -> str:
        return self.paths[index]


def predict_from(workdir, source, checkpoint="newest", top: int | None = None) -> tuple[Predictions, dict[str, str], dict]:
    """(predictions, name -> reason of images that cannot be used, {"checkpoint", "samples", "epoch"}).

    source: as for `Loader`, labels being of no account. The rows of images that cannot be used hold class -1, no names and NaN.
    """
    config = run_config(workdir)
    names = class_names(workdir, config.model.classes)
    top = min(TOP, len(names)) if top is None else top
    if not isinstance(top, (int, np.integer)) or not 1 <= top <= len(names):
        raise ConfigError(f"--top: {top!r} is not allowed; the run has {len(names)} classes; give 1 to {len(names)}")
    if not len(source):
        raise ConfigError("images: none is given; give at least one")
    here = dataclasses.replace(config, mesh=Mesh(cpu_devices=config.mesh.cpu_devices))  # not the mesh that trained it
    state, config, sealed = restored(workdir, str(checkpoint), here)
    loader = to_predict(config, source)
    classes, probabilities, usable = _likeliest(config, state, loader, int(top))
    if not np.isfinite(probabilities[usable]).all():
        raise ConfigError(
            f"--checkpoint: {sealed.path.name!r} is not allowed; the probabilities that {sealed.path} gives are not finite; "
            "give another one"
        )
    classes[~usable], probabilities[~usable] = -1, np.nan
    told = Predictions(classes, [[names[k] for k in row if k >= 0] for row in classes], probabilities)
    return told, loader.bad, {"checkpoint": str(sealed.path), "samples": sealed.samples, "epoch": sealed.told["epoch"]}


def _likeliest(config: Config, state, loader, top: int):
    """(classes [N, top], probabilities [N, top], bool [N]: whether the image could be used)."""
    mesh = jax.tree.leaves(state)[0].sharding.mesh
    step = make_prediction_step(config, models.create(config.model), pixel_statistics(config), mesh, top)
    params, batch_stats = state.evaluated
    images, rows = batch_of(config, len(loader), mesh)
    starts = range(0, len(loader), images)
    ahead, found = feed.Ahead(partial(feed.evaluation_batch, loader, images, np.arange(rows)), starts, threads=1), []
    try:
        for start in starts:
            batch = ahead.next()
            count = min(images, len(loader) - start)
            told = jax.device_get(step(params, batch_stats, feed.put(batch, mesh)))
            found.append([part[:count] for part in (*told, batch["weights"] > 0)])
    finally:
        ahead.close()
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]
