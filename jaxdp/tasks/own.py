"""Tasks of `jaxdp.register_task`, with the functions of a built-in task."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxdp.choices import TASKS
from jaxdp.config import Optimizer
from jaxdp.errors import ConfigError, first_line, printable
from jaxdp.losses import Mix, soft_targets
from jaxdp.task import Task

ADDED = ("images", "constants")  # parameters that a loss may have besides outputs and targets


class OwnTask:
    """A registered task. name: as registered. Raises ConfigError for constants that are no arrays of numbers."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self.task = name, task
        try:
            jax.eval_shape(lambda constants: constants, task.constants)
        except TypeError as error:
            raise ConfigError("constants", reason=first_line(error), hint="give a tree of arrays of numbers") from None
        self.added = [added for added in ADDED if added in inspect.signature(task.loss).parameters]

    def loss(self, optimizer: Optimizer, outputs: Any, targets: Any, *, mix: Mix | None = None, **more: Any) -> jax.Array:
        """The loss of each image, [B]. more: images and constants."""
        outputs = self.arranged(outputs)
        found = self.task.loss(
            outputs, self._training_targets(optimizer, outputs, targets, mix=mix), **{name: more[name] for name in self.added}
        )
        count = len(jax.tree.leaves(outputs)[0])
        if (shape := getattr(found, "shape", None)) != (count,):
            given = type(found).__name__ if shape is None else f"an array of shape {shape}"
            reason = f"the loss of the task returned {given} for {count} images"
            raise ConfigError("register_task", self.name, reason=reason, hint="return the loss of each image, [B]")
        return found

    def _training_targets(self, optimizer: Optimizer, outputs: Any, targets: Any, *, mix: Mix | None) -> Any:
        if self.task.like:
            return soft_targets(optimizer, targets, outputs.shape[-1], mix=mix)
        if mix is not None:
            assert self.task.mix is not None  # validation refuses it else
            targets = self.task.mix(targets, *mix)
        if optimizer.label_smoothing:
            assert self.task.smooth is not None
            targets = self.task.smooth(targets, optimizer.label_smoothing)
        return targets

    def arranged(self, outputs: Any) -> Any:
        """Outputs in the shape of the targets, if both are one array of equally many numbers, as [B] of a network's [B, 1]."""
        shape = getattr(self.task.targets, "shape", None)
        if shape is None or not hasattr(outputs, "shape") or math.prod(outputs.shape[1:]) != math.prod(shape):
            return outputs
        return outputs.reshape(len(outputs), *shape)

    def predicted(self, outputs: Any, targets: Any) -> Any:
        """What the model predicts for each image: its outputs, or what the task that it is like makes of them."""
        like = self.task.like
        return TASKS.implementation(like).predicted(outputs, targets) if like else self.arranged(outputs)

    def probabilities(self, outputs: Any) -> Any:
        """The probability of each class of a task like `classes` or `labels`; else the outputs."""
        return TASKS.implementation(self.task.like).probabilities(outputs) if self.task.like else self.arranged(outputs)

    def metric(self, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """A metric of the task's targets, of the outputs of a model."""
        return lambda outputs, targets: function(self.arranged(outputs), targets)

    def shown(self, output: Any) -> str:
        """The output for an image, for people."""
        return printable(str(self.task.show(output))) if self.task.show else as_text(output)


def as_text(value: Any) -> str:
    """A target or an output of an image, for people: numbers, with their names if they have some."""
    names = value.dtype.names if isinstance(value, np.void) else value if isinstance(value, Mapping) else None
    if names is not None:
        return ", ".join(f"{name} {as_text(value[name])}" for name in names)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(as_text, value))
    return np.array2string(np.asarray(value), precision=4, separator=", ", threshold=8)
