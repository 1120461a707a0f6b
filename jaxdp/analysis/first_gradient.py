"""The gradient of a run's first step, to compare strategies with one another or a mesh with a single device."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxdp import models
from jaxdp.config import Config, at_image_size
from jaxdp.data.prefetch import to_global, train_batch
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES
from jaxdp.setup.prepare import prepare
from jaxdp.training.objective import Batch
from jaxdp.training.state import TrainState, create_state
from jaxdp.training.step import make_layout, step_gradient
from jaxdp.training.step_compiler import mesh_of
from jaxdp.validation import validate
from jaxdp.xla.jax_options import jaxdp_jax_config


@jaxdp_jax_config()
def first_gradient(config: Config) -> dict[str, Any]:
    """The mean gradient over all devices in the first step of `config`: NumPy arrays in the tree of the parameters.

    Nothing is trained or written. Raises ConfigError if the run cannot start.
    """
    plan, devices, datasets = prepare(validate(config))
    phase = plan.phases[0]
    config = at_image_size(plan.config, phase.image_size)
    config = dataclasses.replace(config, reduce=dataclasses.replace(config.reduce, update="replicated"))
    mesh, model = mesh_of(phase, devices), models.create(config.model)
    state = create_state(config, model, mesh)
    host_batch: dict[str, np.ndarray] = train_batch(
        datasets.train_at(phase.image_size),
        seed=config.seed,
        first_sample=0,
        global_batch=phase.global_batch,
        repeats=config.data.repeats,
    )

    pixel_stats, layout = (datasets.mean, datasets.std), make_layout(config, model, mesh)
    gradients = step_gradient(config, layout, pixel_stats=pixel_stats, accumulation=phase.accumulation)

    def gradient(state: TrainState, batch: Batch) -> dict:
        return gradients(state, batch, config.seed)[0]

    replicated, sharded = PartitionSpec(), PartitionSpec(AXES)
    in_specs, check_vma = (replicated, sharded), allreduce.check_vma(config.reduce.strategy)
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=in_specs, out_specs=replicated, check_vma=check_vma)
    return jax.device_get(jax.jit(mapped)(state, to_global(host_batch, mesh)))
