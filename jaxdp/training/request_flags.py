"""Requests to save or to stop, carried by the metrics that a step reduces: every process reads the largest of any device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jaxdp.parallel.mesh import AXES
from jaxdp.training.objective import Batch, Gradient, Metrics, Step
from jaxdp.training.state import TrainState

NONE, SAVE, STOP = range(3)  # as in `jaxdp.distributed.process_group`
BATCH_KEY = "requests"  # the key of a batch: int32 [devices], sharded over all devices


def as_flags(requests: jax.Array) -> jax.Array:
    """[whether the device asks for SAVE or more, whether for STOP] as 1.0 or 0.0. requests: int32 [1], the device's own.

    A sum or mean over all devices is positive if any device asks for at least that request. So the flags fit into an all-reduce
    of other float32 values.
    """
    return (requests >= jnp.arange(1, STOP + 1, dtype=jnp.int32)).astype(jnp.float32)


def from_total(total: jax.Array) -> jax.Array:
    """The largest request of any device, an int32 scalar. total: sum or mean of `as_flags` over all devices."""
    return jnp.sum(total > 0, dtype=jnp.int32)


def abstract(mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a batch's requests."""
    return jax.ShapeDtypeStruct((mesh.size,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(AXES)))


@functools.cache
def on_devices(request: int, mesh: Mesh) -> jax.Array:
    """This process's request, on its devices of a mesh. Cached, because most steps have the same request."""
    sharding = NamedSharding(mesh, PartitionSpec(AXES))
    local = np.full(len(sharding.addressable_devices), request, np.int32)
    return jax.make_array_from_process_local_data(sharding, local)


def none(mesh: Mesh) -> dict[str, jax.Array]:
    """The part of a batch with which no process asks for anything."""
    return {BATCH_KEY: on_devices(NONE, mesh)}


def with_requests(gradient_of: Gradient) -> Gradient:
    """The requests of a batch join aux, so they travel in the same message."""

    def gradient(state: TrainState, batch: Batch, seed: ArrayLike) -> tuple[dict, dict]:
        others = {name: value for name, value in batch.items() if name != BATCH_KEY}
        gradient, aux = gradient_of(state, others, seed)
        if BATCH_KEY in batch:
            aux |= {BATCH_KEY: as_flags(batch[BATCH_KEY])}
        return gradient, aux

    return gradient


def with_request_metric(step: Step) -> Step:
    """The metric "request" is the largest request of any device."""

    def requesting(state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        new, metrics = step(state, batch, hyperparameters)
        if BATCH_KEY in metrics:
            metrics["request"] = from_total(metrics.pop(BATCH_KEY))
        return new, metrics

    return requesting
