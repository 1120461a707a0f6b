"""Devices of meshes."""

from jaxdp.parallel.mesh import devices_of_every_process


def test_a_smaller_mesh_uses_the_first_devices_of_every_process():
    devices = [f"{process}.{number}" for process in range(3) for number in range(4)]
    assert devices_of_every_process(devices, 6, 3) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert devices_of_every_process(devices, 12, 3) == devices
