"""From a config to an optax transformation."""

import jax
import optax

from jaxdp.config import Optimizer
from jaxdp.optim.lars import lars, more_than_one_dimension


def build(config: Optimizer, learning_rate, momentum, multipliers: dict | None = None) -> optax.GradientTransformation:
    """The transformation for this learning rate and momentum; its state does not depend on their values.

    multipliers: factors on the learning rate of parameters, by their names at the top of the tree; others have 1.

    SGD has the rate outside the velocity, equation 9 of Goyal et al. (arXiv 1706.02677): a change of rate needs no momentum
    correction. LARS has it inside.
    """
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    if config.name == "lars":
        inner = lars(
            learning_rate,
            momentum,
            config.weight_decay,
            config.trust_coefficient,
            config.eps,
            config.nesterov,
            config.denominator,
        )
    else:
        inner = optax.chain(
            optax.add_decayed_weights(config.weight_decay, mask=more_than_one_dimension),
            optax.trace(decay=momentum, nesterov=config.nesterov),
            optax.scale(-learning_rate),
        )
    return optax.chain(clip, inner, *([_multiplied(multipliers)] if multipliers else []))


def _multiplied(multipliers: dict) -> optax.GradientTransformation:
    """Updates are proportional to the rate, whether it stands inside the velocity or not: they are what is multiplied."""

    def update(updates, params):
        return updates | {name: jax.tree.map(lambda u, k=k: k * u, updates[name]) for name, k in multipliers.items()}

    return optax.stateless(update)
