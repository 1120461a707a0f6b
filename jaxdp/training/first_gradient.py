"""The gradient of a run's first step, to be compared: strategies with one another, a mesh with a single device."""

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxdp import models
from jaxdp.config import Config
from jaxdp.data.feed import put
from jaxdp.data.order import sample_ids
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES
from jaxdp.training.prepared import Prepared
from jaxdp.training.programs import mesh_of
from jaxdp.training.state import create_state
from jaxdp.training.step import gradient_and_report
from jaxdp.validation import validate


def first_gradient(config: Config):
    """The gradient of the first step of `config`, as its devices combine it: NumPy arrays in the tree of the parameters.

    Nothing is trained and nothing is written. Raises ConfigError where the run could not be begun.
    """
    config = validate(config)
    prepared = Prepared.of(config)
    phase, data = prepared.plan.phases[0], prepared.datasets
    mesh, model = mesh_of(phase, prepared.devices), models.create(config.model)
    state = create_state(config, model, mesh)
    positions = np.arange(phase.global_batch)
    images, labels = data.train.batch(sample_ids(config.seed, positions, len(data.train)), positions)
    batch = {"images": images, "labels": labels, "positions": positions.astype(np.uint32)}

    def gradient(params, batch_stats, batch):
        pixels = (data.mean, data.std)
        return gradient_and_report(config, model, pixels, phase.accumulation, params, batch_stats, batch)[0]

    everywhere, rows = PartitionSpec(), PartitionSpec(AXES)
    proven = allreduce.proves_replication(config.reduce.strategy)
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(everywhere, everywhere, rows), out_specs=everywhere, check_vma=proven)
    return jax.device_get(jax.jit(mapped)(state.params, state.batch_stats, put(batch, mesh)))
