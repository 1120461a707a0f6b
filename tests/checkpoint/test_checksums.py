"""Tests of jaxdp.checkpoint.checksums."""

import jax
import numpy as np
from helpers.checkpoints import diverged_array, replicate
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.checkpoint.checksums import array_checksum, diverged_devices, local_parts, minority, part_checksums
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


def sharded_array(mesh, values, changed=None):
    """An array of shape [1, n] in parts along the rows; `changed`: a device whose part has another value."""
    sharding = NamedSharding(mesh, PartitionSpec(None, "horizontal"))
    array = jax.device_put(values, sharding)
    copies = [jax.device_put(np.asarray(s.data) + (s.device == changed), s.device) for s in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(values.shape, sharding, copies)


def test_diverged_devices_of_shards_compares_the_replicas_of_each_part():
    mesh, values = make_mesh(3, 2), np.arange(8, dtype=np.float32)[None]
    whole = replicate(mesh, scale=np.float32(3))
    assert diverged_devices([whole, sharded_array(mesh, values)]) == []
    device = mesh.devices[2, 1]
    assert diverged_devices([whole, sharded_array(mesh, values, changed=device)]) == [device]


def test_part_checksums_of_whole_arrays_differ_only_in_the_part_that_differs():
    mesh = make_mesh(1, 2)
    shards = {"a": sharded_array(mesh, np.arange(8, dtype=np.float32)[None]), "b": replicate(mesh, b=np.float32(1))["b"]}
    parts = local_parts(shards)
    assert (parts.numbers, parts.total, parts.sharded) == ((0, 1), 2, (True, False))
    whole = {"a": np.arange(7, dtype=np.float32), "b": np.float32(1)}  # of 7 elements; the eighth is padding
    changed = {"a": np.array([0, 1, 2, 3, 4, 5, 9], np.float32), "b": np.float32(2)}
    expected, ours = part_checksums(whole, parts), part_checksums(changed, parts)
    assert expected["0"] == ours["0"]
    assert expected["1"] != ours["1"]
    assert local_parts({"b": shards["b"]}).numbers == ()


def test_minority_without_more_than_half_is_everyone():
    assert minority({0: "a", 1: "b"}) == [0, 1]
    assert minority({0: "a", 1: "b", 2: "a", 3: "b"}) == [0, 1, 2, 3]
    assert minority({0: "a", 1: "b", 2: "a"}) == [1]
