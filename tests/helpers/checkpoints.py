"""Replicated states and metadata for tests of checkpoints."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def metadata(samples):
    """The fields that a manifest's metadata must contain."""
    return {"progress": {"samples": samples, "steps": 1}, "config": {}, "epoch": 1.0}


def replicate(mesh, **arrays):
    return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))


def diverged_array(mesh, shape, different):
    """A replicated array whose value on device number `different` differs from the others."""
    copies = [
        jax.device_put(np.full(shape, 1.0 + (number == different), np.float32), device)
        for number, device in enumerate(mesh.devices.flat)
    ]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec()), copies)
