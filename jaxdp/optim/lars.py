"""LARS, layer-wise adaptive rate scaling (You et al., arXiv 1708.03888), composed from optax parts."""

import jax
import jax.numpy as jnp
import optax


def more_than_one_dimension(params):
    """True for the tensors that are adapted and decayed: not biases, not batch normalisation."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def scale_by_lars_ratio(
    weight_decay=1e-4, trust_coefficient=0.001, eps=1e-6, denominator="sum_of_norms", mask=more_than_one_dimension
) -> optax.GradientTransformation:
    """g -> t * (g + decay * w) with the trust ratio t of each tensor; tensors that the mask leaves out pass unchanged.

    t = trust_coefficient * |w| / (|g| + decay * |w| + eps) for `sum_of_norms` (You et al.'s code, TensorFlow, MLPerf), with
    |g + decay * w| in the denominator for `norm_of_sum` (optax.lars); t = 1 where |w| or the other norm is 0.
    """

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("LARS needs the parameters: call update(gradients, state, params)")

        def one(g, w, adapt):
            if not adapt:
                return g
            decayed = g + weight_decay * w
            weight_norm, gradient_norm = optax.tree.norm(w), optax.tree.norm(g)
            if denominator == "sum_of_norms":
                bottom = gradient_norm + weight_decay * weight_norm
                usable = (weight_norm > 0) & (gradient_norm > 0)
            else:
                bottom = optax.tree.norm(decayed)
                usable = (weight_norm > 0) & (bottom > 0)
            ratio = jnp.where(usable, trust_coefficient * weight_norm / (bottom + eps), 1.0)
            return ratio * decayed

        return jax.tree.map(one, updates, params, mask(params) if callable(mask) else mask), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def lars(
    learning_rate,
    momentum=0.9,
    weight_decay=1e-4,
    trust_coefficient=0.001,
    eps=1e-6,
    nesterov=False,
    denominator="sum_of_norms",
    mask=more_than_one_dimension,
) -> optax.GradientTransformation:
    """v = m v + L t (g + b w); w = w - v (Nesterov: w = w - (L t (g + b w) + m v)), the learning rate inside the velocity.

    learning_rate, momentum: a float, a traced scalar or a schedule (step -> value). mask: a tree of booleans, or a function of
    the parameters, True where trust ratio and decay apply. Raises ValueError for an unknown denominator.
    """
    if denominator not in ("sum_of_norms", "norm_of_sum"):
        raise ValueError(f"denominator: {denominator!r} is not allowed; give 'sum_of_norms' or 'norm_of_sum'")

    def build(learning_rate, momentum):
        return optax.chain(
            scale_by_lars_ratio(weight_decay, trust_coefficient, eps, denominator, mask),
            optax.scale(learning_rate),
            optax.trace(decay=momentum, nesterov=nesterov),
            optax.scale(-1.0),
        )

    return _with_schedules(build, learning_rate, momentum)


def _with_schedules(build, learning_rate, momentum):
    if not callable(learning_rate) and not callable(momentum):
        return build(learning_rate, momentum)
    return optax.inject_hyperparams(build)(learning_rate=learning_rate, momentum=momentum)
