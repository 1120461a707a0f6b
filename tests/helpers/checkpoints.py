"""Replicated states and metadata for tests of checkpoints."""

import hashlib
import json

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.checkpoint.manifest import MANIFEST


def metadata(samples):
    """The fields that a manifest's metadata must contain."""
    return {"progress": {"samples": samples, "steps": 1}, "config": {}, "epoch": 1.0}


def save_now(manager, state, samples, more=None, **options):
    """Save a state, and wait until that is complete. more: further fields of the metadata."""
    manager.save(state, samples, metadata(samples) | (more or {}), **options)
    manager.wait()


def replicate(mesh, **arrays):
    return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))


def diverged_array(mesh, shape, different):
    """A replicated array whose value on device number `different` differs from the rest."""
    copies = [
        jax.device_put(np.full(shape, 1.0 + (number == different), np.float32), device)
        for number, device in enumerate(mesh.devices.flat)
    ]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec()), copies)


def sharded_array(mesh, values, changed=None):
    """An array of shape [1, n] in parts along the rows; `changed`: a device whose part has other values."""
    sharding = NamedSharding(mesh, PartitionSpec(None, "horizontal"))
    array = jax.device_put(values, sharding)
    copies = [jax.device_put(np.asarray(s.data) + (s.device == changed), s.device) for s in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(values.shape, sharding, copies)


def rewrite_manifest(path, change):
    """Apply `change` to the content of a manifest and write it with a correct hash."""
    body = json.dumps(change(json.loads((path / MANIFEST).read_bytes().rstrip().rpartition(b"\n")[0]))).encode()
    (path / MANIFEST).write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")
