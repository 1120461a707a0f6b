from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.checkpoints import replicate, sharded_array
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.checkpoint.replicas import (
    WHOLE,
    StateReport,
    array_checksum,
    describe_arrays,
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


def test_describe_arrays_gives_checksums_of_what_is_on_the_host():
    tree = {
        "a": np.ones((2, 3), np.float16),
        "b": (jax.ShapeDtypeStruct((4,), np.int32), replicate(make_mesh(1, 2), x=1.5)["x"]),
    }
    assert describe_arrays(tree) == {
        "['a']": ["float16", [2, 3], array_checksum(tree["a"])],
        "['b'][0]": ["int32", [4], None],
        "['b'][1]": ["float32", [], None],
    }


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_diverged_devices_are_all_but_a_majority_by_number(dtype, shape):
    """Of arrays of any dtype and shape, beside an empty one; the mesh has the devices in another order."""
    devices = jax.devices()[::-1]
    sharding = NamedSharding(jax.sharding.Mesh(np.array(devices), ("x",)), PartitionSpec())
    for values in ("00000000", "00100000", "10100001", "11101111", "00001111", "00011222"):
        copies = [
            jax.device_put(np.full(shape, int(v)).astype(jax.numpy.dtype(dtype)), d)
            for v, d in zip(values, devices, strict=True)
        ]
        held = dict(zip(devices, values if dtype != "bool" else values.replace("2", "1"), strict=True))
        most = [v for v in "01" if 2 * [*held.values()].count(v) > len(devices)]
        expected = [d for d in jax.devices() if held[d] not in most]
        tree = [jax.device_put(np.ones((0, 3)), sharding), jax.make_array_from_single_device_arrays(shape, sharding, copies)]
        assert diverged_devices(tree) == expected, values


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


def test_copies_of_all_replicas_to_the_host_start_before_the_first_is_read():
    events = []

    class Data(SimpleNamespace):
        def copy_to_host_async(self):
            events.append("copy")

        def __array__(self, *arguments, **options):
            events.append("read")
            return np.zeros(2, np.float32)

    tree = [SimpleNamespace(addressable_shards=[SimpleNamespace(index=0, device=n, data=Data(itemsize=4))]) for n in range(2)]
    assert diverged_devices(tree) == []
    assert events == ["copy", "copy", "read", "read"]


@pytest.mark.parametrize(("leaf", "column"), [(leaf, column) for leaf in range(2) for column in range(4)])
def test_part_checksums_differ_only_in_the_part_that_differs(leaf, column):
    """Of two arrays of different widths beside one that is whole and an empty one; on any number of rows."""
    mesh, values = make_mesh(1, 4), [np.arange(size, dtype=np.float32)[None] for size in (8, 12)]
    rest = [replicate(mesh, b=np.float32(1))["b"], sharded_array(mesh, np.zeros((1, 0), np.float32))]
    expected = part_checksums([sharded_array(mesh, each) for each in values] + rest)
    device = mesh.devices[0, column]
    changed = [sharded_array(mesh, each, changed=device if number == leaf else None) for number, each in enumerate(values)]
    differ = {number for number, digest in part_checksums(changed + rest).items() if digest != expected[number]}
    assert (sorted(expected), differ) == (list("0123"), {str(column)})
    assert part_checksums(rest) == {}
    assert part_checksums([sharded_array(make_mesh(2, 4), each) for each in values] + rest) == expected


def test_minority_without_more_than_half_is_everyone():
    assert minority({}) == []
    assert minority({0: "a", 1: "b"}) == [0, 1]
    assert minority({0: "a", 1: "b", 2: "a", 3: "b"}) == [0, 1, 2, 3]
    assert minority({0: "a", 1: "b", 2: "a"}) == [1]


HOSTS = ["a", "b", "c"]


def report(checksum="1", *, diverged=(), parts=None, **options):
    checksums = ({WHOLE: checksum} if checksum else {}) | (parts or {})
    return StateReport(diverged=list(diverged), checksums=checksums, bad_images={}, **options)


def test_rejection_reason_of_equal_finite_states_is_none():
    assert rejection_reason(8, [report(), report(), report(None)], HOSTS) is None


def test_rejection_reason_names_the_rank_whose_checksum_differs_from_the_majority():
    reason = rejection_reason(8, [report(), report("2"), report()], HOSTS)
    assert "at samples 8: rank 1 on b differs from the rest" in reason


def test_rejection_reason_names_all_that_differ_devices_before_ranks_and_both_before_infinity():
    for reports, expected in (
        (
            [report(diverged=["cpu:0", "cpu:1"]), report("2", finite=False), report(diverged=["cpu:5"])],
            "cpu:0 and cpu:1 and cpu:5",
        ),
        ([report("1"), report("2", finite=False)], "rank 0 on a and rank 1 on b"),
        ([report("1"), report("2"), report("3")], "rank 0 on a and rank 1 on b and rank 2 on c"),
    ):
        assert f"at samples 8: {expected} differ from one another; no checkpoint" in rejection_reason(8, reports, HOSTS)
    parts = [{"0": "a"}, {"0": "b"}, {"0": "a"}]  # of a state that is the same as a whole
    assert rejection_reason(8, [report(parts=part) for part in parts], HOSTS) is None


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
    assert "at samples 8: rank 3 on host3 differs from the rest" in reason
