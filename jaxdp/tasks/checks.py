"""Check of a task and its metrics before a run: they are traced with the outputs of the model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp import metrics
from jaxdp.choices import TASKS
from jaxdp.config import Config
from jaxdp.errors import ConfigError, registered_function
from jaxdp.metrics import LOSS, METRICS
from jaxdp.targets import as_tree, target_of

IMAGES = 3


def check_outputs(config: Config, outputs: Any) -> None:
    """Trace the loss of a registered task, its gradient, and registered metrics. outputs: shapes for one image.

    Raises ConfigError if they fail, if the loss or a metric is not [B], and for a tree of outputs where the task takes logits.
    """
    own, size = TASKS[config.task].own, config.data.image_size
    if (own is None or own.like) and not hasattr(outputs, "shape"):
        reason = f"returns {len(jax.tree.leaves(outputs))} arrays, and task={config.task!r} takes logits [B, classes]"
        raise ConfigError("model.name", config.model.name, reason=reason, hint="return logits, or register a task")
    abstract = partial(
        jax.tree.map, lambda part: jax.ShapeDtypeStruct((IMAGES, *part.shape[1:]), part.dtype)
    )  # starts no device
    outputs, targets = abstract(outputs), abstract(as_tree(target_of(config).empty(1)))
    if own is not None:
        loss, images = TASKS.implementation(config.task).loss, jax.ShapeDtypeStruct((IMAGES, size, size, 3), jnp.float32)

        mix = (targets, jax.ShapeDtypeStruct((IMAGES,), jnp.float32)) if config.data.mix != "none" else None

        def gradient(outputs: Any, targets: Any, arrays: dict[str, Any]) -> Any:
            given = arrays | {"constants": own.constants}
            return jax.grad(lambda outputs: loss(config.optimizer, outputs, targets, **given).mean())(outputs)

        _trace("register_task", config.task, gradient, given=(outputs, targets, {"images": images, "mix": mix}))
    of_images = [name for name in metrics.names(config.task) if name != LOSS and METRICS[name].of == "images"]
    for name in [name for name in of_images if name in METRICS.registered]:
        values = _trace("register_metric", metrics.bare(name), METRICS.implementation(name), given=(outputs, targets))
        metrics.check_values(name, values, IMAGES)


def _trace(register: str, name: str, function: Callable[..., Any], *, given: tuple) -> Any:
    """What the function returns, in shapes; numbers of Python stay themselves."""
    found = None

    def call(*arguments: Any) -> Any:
        nonlocal found
        found = function(*arguments)
        return found

    of_task = register == "register_task"
    hint = "jaxdp.Task says what its functions get" if of_task else "it gets (outputs, targets) of a batch"
    with registered_function(register, name, hint=hint):
        jax.eval_shape(call, *given)
    return found
