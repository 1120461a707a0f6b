import jax
import numpy as np
from helpers.checkpoints import replicate, sharded_array
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.checkpoint.checksums import (
    WHOLE,
    StateReport,
    array_checksum,
    diverged_devices,
    minority,
    part_checksums,
    rejection_reason,
)
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


def test_part_checksums_differ_only_in_the_part_that_differs():
    mesh, values = make_mesh(1, 2), np.arange(8, dtype=np.float32)[None]
    whole = replicate(mesh, b=np.float32(1))["b"]
    expected = part_checksums([whole, sharded_array(mesh, values)])
    changed = part_checksums([whole, sharded_array(mesh, values, changed=mesh.devices[0, 1])])
    assert set(expected) == {"0", "1"}
    assert expected["0"] == changed["0"]
    assert expected["1"] != changed["1"]
    assert part_checksums([whole]) == {}


def test_minority_without_more_than_half_is_everyone():
    assert minority({}) == []
    assert minority({0: "a", 1: "b"}) == [0, 1]
    assert minority({0: "a", 1: "b", 2: "a", 3: "b"}) == [0, 1, 2, 3]
    assert minority({0: "a", 1: "b", 2: "a"}) == [1]


HOSTS = ["a", "b", "c"]


def report(checksum="1", *, diverged=(), finite=True, parts=None):
    checksums = ({WHOLE: checksum} if checksum else {}) | (parts or {})
    return StateReport(diverged=list(diverged), checksums=checksums, bad_images={}, finite=finite)


def test_rejection_reason_of_equal_finite_states_is_none():
    assert rejection_reason(8, [report(), report(), report(None)], HOSTS) is None


def test_rejection_reason_names_the_rank_whose_checksum_differs_from_the_majority():
    reason = rejection_reason(8, [report(), report("2"), report()], HOSTS)
    assert "at samples 8: rank 1 on b differs from the others" in reason


def test_rejection_reason_of_infinite_parameters():
    assert "not finite at samples 8" in rejection_reason(8, [report(), report(finite=False), report()], HOSTS)


def test_rejection_reason_of_shards_names_the_rank_whose_part_differs():
    """A mesh of three rows and two columns, one process for each device: rank 3, in row 1 and column 1, has another part 1.

    Rank 2 gathered that part from it, so that the checksums of the whole state differ on both.
    """
    parts = [{"0": "a"}, {"1": "b"}, {"0": "a"}, {"1": "wrong"}, {"0": "a"}, {"1": "b"}]
    wholes = ["ab", "ab", "awrong", "awrong", "ab", "ab"]
    reports = [report(whole, parts=part) for whole, part in zip(wholes, parts, strict=True)]
    reason = rejection_reason(8, reports, [f"host{rank}" for rank in range(6)])
    assert "at samples 8: rank 3 on host3 differs from the others" in reason
