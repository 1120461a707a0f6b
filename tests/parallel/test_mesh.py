"""Devices of meshes."""

import jax
import pytest

import jaxdp
from jaxdp.parallel.mesh import devices_of_every_process


def test_a_side_that_is_not_given_follows_from_the_devices():
    assert dict(jaxdp.make_mesh().shape) == {"vertical": 2, "horizontal": 4}
    assert dict(jaxdp.make_mesh(horizontal=2).shape) == {"vertical": 4, "horizontal": 2}
    mesh = jaxdp.make_mesh(1, 3, jax.devices()[2:])
    assert mesh.devices.tolist() == [jax.devices()[2:5]]


def test_a_mesh_with_more_devices_than_there_are_is_an_error():
    with pytest.raises(jaxdp.ConfigError, match="mesh='3x3': needs 9 devices, 8 available"):
        jaxdp.make_mesh(3, 3)
    for sides in ((0, 2), (-1, -1), (0,), (None, -2)):
        with pytest.raises(jaxdp.ConfigError, match=r"8 (devices )?available"):
            jaxdp.make_mesh(*sides)


def test_a_smaller_mesh_uses_the_first_devices_of_every_process():
    devices = [f"{process}.{number}" for process in range(3) for number in range(4)]
    assert devices_of_every_process(devices, 6, 3) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert devices_of_every_process(devices, 12, 3) == devices
