"""Optimizers compute in float32, and keep their state in float32, whatever the dtypes of gradient and parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def with_schedules(build: Callable[..., optax.GradientTransformation], **hyperparameters: Any) -> optax.GradientTransformation:
    """`build` of hyperparameters, in float32. Each may be a schedule (step -> value)."""
    if any(callable(value) for value in hyperparameters.values()):
        return in_float32(optax.inject_hyperparams(build)(**hyperparameters))
    return in_float32(build(**hyperparameters))


def in_float32(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """A rule that computes and keeps its state in float32 even if gradient and parameters have 16 bits.

    Updates have the dtypes of the parameters, and the state keeps its own, whatever the dtypes of hyperparameters.
    """
    inner = optax.with_extra_args_support(rule)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        found, new_state = inner.update(_wide(updates), state, _wide(params), **extra)
        return _with_dtypes(found, updates if params is None else params), _with_dtypes(new_state, state)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(_wide(params)), update)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)


def _with_dtypes(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda leaf, other: leaf.astype(other.dtype), tree, like)
