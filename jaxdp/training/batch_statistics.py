"""The running statistics of batch normalization after a step, from the statistics of the batches of all devices."""

import jax.numpy as jnp


def update_statistics(batch_stats: dict, moments: dict, decay: float) -> dict:
    """One moving-average update of the running statistics. moments: means and mean squares, averaged over all devices.

    The variance is their mean square minus squared mean.
    """

    def update(stats: dict, new: dict) -> dict:
        if "mean" not in stats:
            return {name: update(stats[name], new[name]) for name in stats}
        variance = jnp.maximum(new["square"] - new["mean"] ** 2, 0.0)
        return {
            "mean": decay * stats["mean"] + (1 - decay) * new["mean"],
            "var": decay * stats["var"] + (1 - decay) * variance,
        }

    return update(batch_stats, moments)
