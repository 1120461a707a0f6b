"""Stochastic depth (drop-path): residual branches that are left out at random in training (Huang et al., arXiv 1603.09382).

As in timm, an image keeps the branch of block i of n, counted from 0, with probability 1 - rate i / (n - 1). A branch that is
kept is divided by this probability, so that its expectation is the branch. The paper (section 3) draws once for a mini-batch,
divides i by n, and multiplies the branch in evaluation instead.
"""

import jax
import jax.numpy as jnp


def block_rate(rate: float, block: int, blocks: int) -> float:
    """The probability that an image skips the branch of a block, counted from 0. rate: the probability of the last block."""
    return rate * block / (blocks - 1)


def branch_factor(keys: jax.Array, rate: float, block: int) -> jax.Array:
    """The factor on a block's branch for each image, [B, 1, 1, 1] float32: 0 with probability `rate`, else 1 / (1 - rate).

    keys: [B], of the images; block: its number, which makes draws of blocks independent.
    """
    uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, block), dtype=jnp.float32))(keys)
    return jnp.where(uniform < rate, 0.0, jnp.float32(1 / (1 - rate)))[:, None, None, None]
