"""Devices of meshes."""

from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType

import jaxdp
from jaxdp.config import Mesh
from jaxdp.errors import ConfigError
from jaxdp.parallel.mesh import AXES, abstract_mesh, choose_shape, default_shape, devices_of_every_process, most_square

TABLE_4 = {1024: (32, 32), 2048: (32, 64), 2176: (34, 64), 3456: (48, 72), 4096: (64, 64)}  # of Mikami et al.


def test_default_shape_is_that_of_table_4_or_the_most_square():
    for devices in [*range(1, 200), *TABLE_4]:
        shapes = [(side, devices // side) for side in range(1, devices + 1) if devices % side == 0]
        square = min((shape for shape in shapes if shape[0] <= shape[1]), key=lambda shape: shape[1] - shape[0])
        assert most_square(devices) == square
        assert default_shape(devices) == choose_shape(Mesh(), devices) == TABLE_4.get(devices, square)
    for near in (devices + step for devices in TABLE_4 for step in (-1, 1)):
        assert default_shape(near) == most_square(near)


@pytest.mark.parametrize("devices", [1, 2, 7, 12])
def test_choose_shape_keeps_the_sides_that_are_set_and_makes_rows_of_hosts(devices):
    sides = [None, *range(-1, devices + 2)]
    for vertical, horizontal in ((one, other) for one in sides for other in sides if (one, other) != (None, None)):
        fitting = [
            shape
            for shape in ((y, x) for y in range(1, devices + 1) for x in range(1, devices + 1))
            if vertical in (None, shape[0]) and horizontal in (None, shape[1])
            if (shape[0] * shape[1] <= devices if None not in (vertical, horizontal) else shape[0] * shape[1] == devices)
        ]
        if fitting:
            assert [choose_shape(Mesh(vertical=vertical, horizontal=horizontal), devices, rows=2)] == fitting
        else:
            with pytest.raises(ConfigError, match="device"):
                choose_shape(Mesh(vertical=vertical, horizontal=horizontal), devices)
    for hosts in range(1, 14):
        rows = hosts if hosts > 1 and devices % hosts == 0 else most_square(devices)[0]
        assert choose_shape(Mesh(), devices, hosts) == (rows, devices // rows)


def test_errors_of_sides_name_what_does_not_fit():
    with pytest.raises(ConfigError, match=r"mesh\.vertical=3: must divide the number of devices, 8"):
        choose_shape(Mesh(vertical=3), 8)
    with pytest.raises(ConfigError, match=r"mesh\.horizontal=9: 8 devices available"):
        choose_shape(Mesh(horizontal=9), 8)


def test_devices_of_a_process_are_a_row_of_axes_that_jax_partitions(monkeypatch):
    for mesh in (jaxdp.make_mesh(2, 4), abstract_mesh(2, 4)):
        assert (mesh.axis_names, mesh.axis_types) == (AXES, (AxisType.Auto,) * 2)
        assert (AXES, tuple(mesh.shape.values())) == (("vertical", "horizontal"), (2, 4))
    devices = [SimpleNamespace(process_index=index // 2) for index in range(8)]
    monkeypatch.setattr(jax, "make_mesh", lambda shape, axes, *, axis_types, devices: (shape, devices))
    assert jaxdp.make_mesh(devices=devices) == ((4, 2), devices)


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
