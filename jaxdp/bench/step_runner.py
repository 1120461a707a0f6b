"""A compiled training step with images generated on the devices, for timing."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp import models
from jaxdp.config import Config
from jaxdp.errors import ConfigError, plural
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES
from jaxdp.strategies import Stage, unsupported_reason
from jaxdp.training.state import TrainState, create_state
from jaxdp.training.step import make_layout, make_train_step, without_reduction
from jaxdp.validation import with_fields
from jaxdp.xla import options

PIXEL_STATS = (127.5, 64.0)


@dataclasses.dataclass
class StepRunner:
    """A compiled step, its batch, and the state that every call advances.

    step: `jax.stages.Compiled`; compile_seconds: to trace, lower and compile it.
    """

    step: Any
    state: TrainState
    batch: dict[str, jax.Array]
    hyperparameters: Mapping[str, np.generic]
    compile_seconds: float

    def __call__(self) -> tuple[Any, dict[str, jax.Array]]:
        """Run a step; (new parameters, metrics)."""
        self.state, metrics = self.step(self.state, self.batch, self.hyperparameters)
        return self.state.params, metrics


def check_strategy(config: Config, devices: int) -> None:
    """Raise ConfigError for a strategy that cannot be timed on this number of devices."""
    strategy = config.reduce.strategy
    if reason := unsupported_reason(strategy, devices):
        raise ConfigError("reduce.strategy", strategy, reason=f"cannot run on {plural(devices, 'device')}: {reason}")


def describe(config: Config) -> str:
    """The display name of the model and its image size."""
    size = config.data.image_size
    return f"{config.model.title}, width {config.model.width}, {size}x{size}, {config.model.dtype}"


def build_with_and_without(config: Config, mesh: Mesh, *, global_batch: int, strategy: str | Stage) -> dict[str, StepRunner]:
    """{"with", "without"}: the step with its reductions, and the same step without any communication."""
    strategies = {"with": strategy, "without": allreduce.no_reduce}
    return {name: build_step(config, mesh, global_batch=global_batch, strategy=each) for name, each in strategies.items()}


def build_step(config: Config, mesh: Mesh, *, global_batch: int, strategy: str | Stage) -> StepRunner:
    """Compile the step of a config with a given all-reduce strategy; `allreduce.no_reduce` removes all communication."""
    per_worker = config.batch[0].per_worker_batch or global_batch // mesh.size
    accumulation = global_batch // mesh.size // per_worker
    if strategy is allreduce.no_reduce:
        overlap = config.reduce.overlap  # what it changes in the step besides the order stays
        config = with_fields(without_reduction(config), {"model.norm": "per_worker", "reduce.overlap": overlap})
    else:
        config = with_fields(config, {"reduce.strategy": strategy})
    model = models.create(config.model)
    rows = NamedSharding(mesh, PartitionSpec(AXES))
    size = config.data.stored_size or config.data.image_size

    def make_batch() -> dict[str, jax.Array]:
        key = jax.random.key(0)
        return {
            "images": jax.random.randint(key, (global_batch, size, size, 3), 0, 256, jnp.int32).astype(jnp.uint8),
            "labels": jnp.arange(global_batch, dtype=jnp.int32) % config.model.class_count,
            "positions": jnp.arange(global_batch, dtype=jnp.uint32),
        }

    batch = jax.jit(make_batch, out_shardings=rows)()
    state = make_layout(config, model, mesh).place(create_state(config, model, mesh))
    step = make_train_step(config, model, mesh, pixel_stats=PIXEL_STATS, accumulation=accumulation)
    hyperparameters = {"learning_rate": np.float32(1e-4), "momentum": np.float32(0.9), "seed": np.uint32(config.seed)}
    compiler_options = options.compiler_options(config, mesh.devices.flat[0].platform)
    began = time.perf_counter()
    compiled = step.lower(state, batch, hyperparameters).compile(compiler_options)
    return StepRunner(compiled, state, batch, hyperparameters, time.perf_counter() - began)
