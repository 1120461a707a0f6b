"""Tests of jaxdp.checkpoint.checksums."""

import jax
import numpy as np
from helpers.checkpoints import diverged_array, replicate
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.checkpoint.checksums import array_checksum, diverged_devices
from jaxdp.parallel.mesh import make_mesh


def test_array_checksum_equals_the_published_check_values():
    """The check values of both CRCs are published for the bytes of "123456789"."""
    assert array_checksum(np.frombuffer(b"123456789", np.uint8)) == "e3069283" + "cbf43926"
    assert array_checksum(np.float32(1.5)) == array_checksum(np.array([1.5], np.float32))


def test_diverged_devices_with_one_flipped_bit_returns_its_device():
    mesh = make_mesh(2, 4)
    values = {"x": np.array([0.0, np.nan, 1.0], np.float32), "y": np.arange(5, dtype=np.int32)}
    assert diverged_devices(replicate(mesh, **values)) == []
    changed = values["x"].copy()
    changed[0] = -0.0
    copies = [
        jax.device_put(changed if number == 6 else values["x"], device) for number, device in enumerate(mesh.devices.flat)
    ]
    x = jax.make_array_from_single_device_arrays((3,), NamedSharding(mesh, PartitionSpec()), copies)
    tree = {"x": x, "y": replicate(mesh, **values)["y"]}
    assert diverged_devices(tree) == [mesh.devices.flat[6]]


def test_diverged_devices_returns_the_minority_even_if_it_is_the_first_device():
    mesh = make_mesh(1, 3)
    assert diverged_devices({"x": diverged_array(mesh, (2, 2), 0)}) == [mesh.devices.flat[0]]
