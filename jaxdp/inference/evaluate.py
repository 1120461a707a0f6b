"""Evaluating a checkpoint on the held-out images."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdp import metrics
from jaxdp.choices import LOSSES, SOURCES, TASKS
from jaxdp.config import Config
from jaxdp.data.datasets import Datasets
from jaxdp.data.sources import open_datasets
from jaxdp.errors import ConfigError, print_safe
from jaxdp.inference.load_run import WEIGHTS, inference_batch, load_run, load_weights, weights_config
from jaxdp.inference.outputs import network_of
from jaxdp.models import preprocessing
from jaxdp.models.summary import check_image_size
from jaxdp.setup.run_dir import class_names, run_config, trained_classes
from jaxdp.training import evaluation
from jaxdp.training.evaluation import Observer
from jaxdp.training.state import constants_of
from jaxdp.validation import validate, with_fields
from jaxdp.xla.jax_options import jaxdp_jax_config


@jaxdp_jax_config()
def evaluate(
    config: Config | None,
    workdir: str | Path,
    checkpoint: str = "result",
    *,
    datasets: tuple[Any, Any] | None = None,
    observer: Observer | None = None,
    flip: bool = False,
) -> dict[str, Any]:
    """Evaluate a checkpoint of the run in `workdir` on all held-out images.

    config: the run's config with changes, such as other data or another evaluation split; None for the run's own. checkpoint:
    result (the newest, or with early stopping the best), newest, best, or its number of samples. datasets: as for
    `jaxdp.train`. observer: receives every batch and the classes predicted for it (see `jaxdp.training.evaluation.Observer`).
    flip: evaluate the mean of the logits of each image and its mirror image.

    Returns eval_accuracy and eval_top5 in [0, 1], eval_loss, eval_examples, samples, epoch and checkpoint (its path). Raises
    ConfigError if the run, the checkpoint or the data cannot be used.
    """
    config = validate(run_config(workdir) if config is None else config, trains=False)
    LOSSES.check(config.optimizer.loss)
    TASKS.check(config.task)
    if config.stop.metric:
        metrics.check(config.stop.metric)
    source = config.data.source
    if SOURCES[source].from_python and datasets is None:
        call = f"jaxdp.evaluate(None, {str(workdir)!r}, datasets=(training, evaluation))"
        reason, hint = "the run was given its images from Python", f"pass them in Python: {call}"
        raise ConfigError("data.source", source, reason=reason, hint=hint)
    if datasets is not None and datasets[1] is not None and config.data.holdout:  # it divides a training set alone
        config = with_fields(config, {"data.holdout": 0.0})
    if config.data.holdout and config.data.holdout != (held_out := run_config(workdir).data.holdout):
        print_safe(
            f"jaxdp: data.holdout={config.data.holdout:g}, in training {held_out:g}: training images may count", sys.stderr
        )
    state, config, manifest = load_run(workdir, checkpoint, config)
    mesh = jax.tree.leaves(state)[0].sharding.mesh
    data = open_datasets(config, datasets, may_lack_classes=True, trained=trained_classes(workdir))
    result = _evaluate_on(data, config, state.eval_variables, mesh=mesh, observer=observer, flip=flip)
    return result | {"samples": manifest.samples, "epoch": manifest.epoch, "checkpoint": manifest.location}


@jaxdp_jax_config()
def evaluate_weights(
    path: str | Path, config: Config | None = None, *, datasets: tuple[Any, Any] | None = None, flip: bool = False
) -> tuple[dict[str, Any], str]:
    """Evaluate a safetensors file of ResNet weights on all held-out images, prepared as belongs to the weights.

    The file names the classes; else the data do, in their order.

    config: from `jaxdp.inference.load_run.weights_config`, with changes, such as the directory of the images; None for that
    function's. datasets, flip: as for `evaluate`.

    Returns (eval_accuracy, eval_top5, eval_loss and eval_examples as of `evaluate`, the file's content and preprocessing in one
    line). Raises ConfigError if the file or the data cannot be used.
    """
    config = weights_config(path) if config is None else config
    if SOURCES[config.data.source].from_python and datasets is None:
        hint = "use --data.source imagenet2012, or folder with --data.directory"
        raise ConfigError("data.source", config.data.source, reason="weights come without images", hint=hint)
    loaded = load_weights(path, config)
    trained = preprocessing.classes_of(path, WEIGHTS)
    data = open_datasets(loaded.config, datasets, may_lack_classes=True, trained=trained)
    return _evaluate_on(data, loaded.config, loaded.eval_variables, mesh=loaded.mesh, flip=flip), loaded.words


class Confusion:
    """Confusion matrix: counts of images by label and predicted class, int64 [classes, classes]. An `Observer`."""

    def __init__(self, classes: int) -> None:
        self.counts = np.zeros((classes, classes), np.int64)

    def __call__(self, batch: dict[str, np.ndarray]) -> Callable[[np.ndarray], None]:
        labels, weights = batch["labels"], batch["weights"]
        return lambda predicted: np.add.at(self.counts, (labels, predicted), weights)


def confusion_matrix(
    config: Config | None, workdir: str | Path, checkpoint: str = "result", *, datasets: tuple[Any, Any] | None = None
) -> tuple[dict[str, Any], np.ndarray, list[str]]:
    """Evaluate a checkpoint and count the held-out images by label and predicted class.

    Arguments and errors as for `evaluate`. Returns (its result, counts int64 [classes, classes] with labels as rows,
    names of the classes). Every image is counted once.
    """
    config = run_config(workdir) if config is None else config
    matrix = Confusion(config.model.class_count)
    result = evaluate(config, workdir, checkpoint, datasets=datasets, observer=matrix)
    return result, matrix.counts, class_names(workdir, config.model.class_count)


def _evaluate_on(
    data: Datasets, config: Config, evaluated: tuple[dict, dict], *, mesh: Mesh, flip: bool, observer: Observer | None = None
) -> dict[str, Any]:
    """Evaluate (params, batch_stats) on the held-out images of `data`; stderr gets the warnings about these."""
    for text in data.warnings:
        print_safe(f"jaxdp: {text}", sys.stderr)
    check_image_size(config.model, config.data.evaluated_size, trained=config.data.image_size, field="data.eval_size")
    step = evaluation.make_evaluation_step(config, network_of(config, flip=flip), mesh, pixel_stats=(data.mean, data.std))
    batch = inference_batch(len(data.evaluation), mesh)
    source, constants = data.evaluation, constants_of(config, mesh)
    evaluated_step = partial(step, constants=constants)
    return evaluation.evaluate(
        evaluated_step, *evaluated, source=source, batch=batch, mesh=mesh, task=config.task, observer=observer
    )
