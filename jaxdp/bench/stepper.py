"""The training step by itself, to be timed: compiled, on images made on the devices."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp import models
from jaxdp.config import Config, ConfigError
from jaxdp.parallel import allreduce, compilation
from jaxdp.parallel.mesh import AXES, unfit
from jaxdp.training.state import create_state
from jaxdp.training.step import make_train_step


@dataclasses.dataclass
class Stepper:
    """A compiled step on made-up images, and the state that it moves along."""

    step: object
    state: object
    batch: dict
    hyperparameters: dict
    compile_seconds: float  # to trace, lower and compile it

    def __call__(self):
        self.state, metrics = self.step(self.state, self.batch, self.hyperparameters)
        return self.state.params, metrics


def check_strategy(config: Config, devices: int, given: str) -> None:
    """Raise ConfigError for a strategy that cannot be timed on so many devices. given: how they are asked for."""
    strategy = config.reduce.strategy
    if strategy == "auto":
        raise ConfigError(
            "reduce.strategy: 'auto' is not allowed here; give one by name, as `jaxdp bench allreduce` recommends"
        )
    if reason := unfit(strategy, devices):
        raise ConfigError(f"reduce.strategy: {strategy!r} is not allowed {given}; {reason}")


def described(config: Config) -> str:
    """The model and its images, for people."""
    size = config.data.image_size
    return f"{config.model.title}, width {config.model.width}, {size}x{size}, {config.model.dtype}"


def with_and_without(config: Config, mesh, global_batch: int, strategy) -> dict[str, Stepper]:
    """The step with its reductions, and the same one that sends nothing, to be timed in turns."""
    ways = {"with": strategy, "without": allreduce.local}
    return {name: stepper(config, mesh, global_batch, way) for name, way in ways.items()}


def stepper(config: Config, mesh, global_batch: int, strategy) -> Stepper:
    """A step of the config that combines gradients by `strategy`; with `allreduce.local` it sends nothing at all."""
    per_worker = config.batch[0].per_worker_batch or global_batch // mesh.size
    accumulation = global_batch // mesh.size // per_worker
    reduce = dataclasses.replace(config.reduce, strategy=strategy)
    norm = "per_worker" if strategy is allreduce.local else config.model.norm
    config = dataclasses.replace(config, reduce=reduce, model=dataclasses.replace(config.model, norm=norm))
    model = models.create(config.model)
    rows = NamedSharding(mesh, PartitionSpec(AXES))
    size = config.data.stored_size or config.data.image_size

    def made():
        key = jax.random.key(0)
        return {
            "images": jax.random.randint(key, (global_batch, size, size, 3), 0, 256, jnp.int32).astype(jnp.uint8),
            "labels": jnp.arange(global_batch, dtype=jnp.int32) % config.model.classes,
            "positions": jnp.arange(global_batch, dtype=jnp.uint32),
        }

    batch = jax.jit(made, out_shardings=rows)()
    state = create_state(config, model, mesh)
    step = make_train_step(config, model, (127.5, 64.0), mesh, accumulation)
    hyperparameters = {"learning_rate": np.float32(1e-4), "momentum": np.float32(0.9), "seed": np.uint32(config.seed)}
    began = time.perf_counter()
    compiled = step.lower(state, batch, hyperparameters).compile(
        compilation.options(config.compile, mesh.devices.flat[0].platform)
    )
    return Stepper(compiled, state, batch, hyperparameters, time.perf_counter() - began)
