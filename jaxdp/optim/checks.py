"""Checks of the user's optimizer and loss before a run: they are traced, or tried on small tensors."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.choices import LOSSES, OPTIMIZERS
from jaxdp.config import Optimizer
from jaxdp.errors import ConfigError, registered_function
from jaxdp.optim.optimizer import build_optimizer


def check_loss(optimizer: Optimizer, classes: int) -> None:
    """Trace a registered loss and its gradient. Raises ConfigError if they fail, or if it does not return [B] float32."""
    if optimizer.loss in LOSSES.builtin:
        return
    images, invalid = 3, partial(ConfigError, "optimizer.loss", optimizer.loss)
    hint = "return the loss of each image, [B], of (logits [B, C], targets [B, C])"

    def losses(logits: jax.Array) -> jax.Array:
        return LOSSES.implementation(optimizer.loss)(optimizer, logits, jnp.zeros(images, jnp.int32))

    def with_gradient(logits: jax.Array) -> tuple[jax.Array, Any]:
        found, vjp_fn = jax.vjp(losses, logits)
        return found, vjp_fn(found) if found.dtype == jnp.float32 else None

    with registered_function("optimizer.loss", optimizer.loss, hint=hint):
        found, _ = jax.eval_shape(with_gradient, jax.ShapeDtypeStruct((images, classes), jnp.float32))
    if (found.shape, found.dtype) != ((images,), jnp.float32):
        shape = f"{found.dtype} of shape {found.shape} for {images} images"
        raise invalid(reason=f"the registered function returned {shape}", hint=hint)


def check_optimizer(config: Optimizer, params: Any) -> None:
    """Trace the first update of a registered optimizer. params: arrays or shapes, float32.

    Raises ConfigError if it fails, or if updates or the new state differ in shape or dtype from parameters or state.
    """
    if config.name not in OPTIMIZERS.registered:
        return

    def first_update(params: Any, learning_rate: jax.Array, momentum: jax.Array) -> tuple[Any, Any, Any]:
        rule = build_optimizer(config, learning_rate, momentum)
        state = rule.init(params)
        return state, *rule.update(params, state, params)

    invalid = partial(ConfigError, "optimizer.name", config.name)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    hint = "updates have the structure of the parameters; learning rate and momentum are traced values"
    with registered_function("optimizer.name", config.name, hint=hint, what="its update failed"):
        state, updates, new_state = jax.eval_shape(first_update, params, scalar, scalar)
    expected = jax.eval_shape(lambda tree: tree, params)
    if different := _difference(expected, updates):
        raise invalid(reason=f"its updates differ from the parameters: {different}", hint="return an update of each parameter")
    if different := _difference(state, new_state):
        raise invalid(reason=f"its new state differs from the state of init: {different}", hint="keep shapes and dtypes")


def check_elementwise(config: Optimizer) -> None:
    """Run three updates of a registered optimizer on two tensors and on halves of them; both must agree.

    Raises ConfigError if they differ, or if the updates of halves fail: the update cannot be sharded.
    """
    if config.name not in OPTIMIZERS.registered:
        return
    random = np.random.default_rng(0)
    params = {"matrix": random.normal(size=(1, 1, 8)), "vector": random.normal(size=(6,))}
    gradients = [jax.tree.map(lambda p: 10 * random.normal(size=p.shape), params) for _ in range(3)]

    def updated(half: slice) -> Any:
        def cut(tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.asarray(x[..., half], jnp.float32), tree)

        now, rule = cut(params), build_optimizer(dataclasses.replace(config, clip_norm=None), 0.1, 0.9)
        state = rule.init(now)
        for gradient in gradients:
            updates, state = rule.update(cut(gradient), state, now)
            now = optax.apply_updates(now, updates)
        return now

    hint = "register it without elementwise=True, and use --reduce.update replicated"
    with registered_function("optimizer.name", config.name, hint=hint, what="the update of a part of each tensor failed"):
        whole = updated(slice(None))
        halves = {name: updated(slice(0, x.shape[-1] // 2))[name] for name, x in params.items()}
        others = {name: updated(slice(x.shape[-1] // 2, None))[name] for name, x in params.items()}
    for name, tensor in whole.items():
        joined = np.concatenate([halves[name], others[name]], axis=-1)
        if not np.allclose(joined, tensor, rtol=1e-5, atol=1e-6):
            reason = "not elementwise: the update of a part of a tensor differs from that part of its update"
            raise ConfigError("optimizer.name", config.name, reason=reason, hint=hint)


def _difference(expected: Any, found: Any) -> str:
    """The first leaf that differs between two trees of shapes, as text; "" if there is none."""
    structure: Any = jax.tree.structure(expected)
    if structure != jax.tree.structure(found):
        return "another structure"
    pairs = zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    for (path, like), leaf in pairs:
        if (like.shape, like.dtype) != (leaf.shape, leaf.dtype):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return f"{name} has shape {leaf.shape} and dtype {leaf.dtype}, not {like.shape} and {like.dtype}"
    return ""
