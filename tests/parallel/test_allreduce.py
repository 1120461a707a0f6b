"""Every strategy against the mean in float64, on every mesh of eight devices, for tensors of many shapes."""

import contextlib
import dataclasses
import hashlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.step import assert_replicated
from helpers.strategies import set_stages
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.errors import ConfigError
from jaxdp.parallel import allreduce, traffic
from jaxdp.parallel.mesh import AXES, HORIZONTAL, VERTICAL, abstract_mesh, make_mesh
from jaxdp.parallel.shards import own_shard
from jaxdp.strategies import STRATEGIES
from jaxdp.xla.hlo import read_schedule

MESHES = [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
# Buckets: all in one, two of the first three, the matrix alone, the same, and each alone.
BUCKET_SIZES = dict(zip(MESHES, [None, 64, allreduce.BUCKET_BYTES, allreduce.BUCKET_BYTES, 1], strict=True))
SHAPES = {"odd": (7,), "scalar": (), "fused": (3, 5), "empty": (0,), "matrix": (130, 128)}


def random_tree(shapes, devices) -> dict:
    """An array for each name, with the devices as its first dimension."""
    random = np.random.default_rng(0)
    return {name: random.normal(size=(devices, *shape)).astype(np.float32) for name, shape in shapes.items()}


def reduce_mean(inputs, mesh_shape, strategy, wire_dtype=None, bucket_bytes=allreduce.BUCKET_BYTES):
    """The mean of the inputs of all devices."""

    def per_device(tree):
        return allreduce.all_reduce_mean(
            jax.tree.map(lambda x: x[0], tree), strategy, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes
        )

    rows, everywhere = PartitionSpec(AXES), PartitionSpec()
    check_vma = allreduce.check_vma(strategy)
    mesh = make_mesh(*mesh_shape)
    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=rows, out_specs=everywhere, check_vma=check_vma))(inputs)


def assert_mean(out, inputs):
    """The mean in float64 to float32's rounding: each of the additions errs by at most 2^-24 of the partial sum."""
    assert out.dtype == jnp.float32
    assert_replicated(out)
    bound = (len(inputs) + 1) * 2**-24 * np.abs(inputs).mean(0, dtype=np.float64)
    assert np.all(np.abs(out - inputs.astype(np.float64).mean(0)) <= bound)


def additions_of(strategy, mesh_shape):
    """A lower bound of the additions in a row that a contribution passes through, from the rounding errors that it collects.

    One device contributes 1, all other devices 2^-24. An addition of 2^-24 to 1 rounds to 1, so every addition that 1 passes
    through can lose 2^-24. Each device has the 1 in as many elements as the vector has shards.
    """
    devices = mesh_shape[0] * mesh_shape[1]
    owner = np.tile(np.arange(devices), devices)
    inputs = np.where(owner == np.arange(devices)[:, None], 1.0, 2.0**-24).astype(np.float32)
    rows, mesh = PartitionSpec(AXES), make_mesh(*mesh_shape)
    mapped = jax.shard_map(
        lambda x: allreduce.all_reduce_sum(x[0], strategy), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
    )
    sums = np.asarray(jax.jit(mapped)(inputs), np.float64)
    return np.max(1 + (devices - 1) * 2.0**-24 - sums) * 2**24


@pytest.mark.parametrize("mesh_shape", [(2, 4), (4, 2)])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_strategy_does_not_exceed_its_max_additions(strategy, mesh_shape):
    assert additions_of(strategy, mesh_shape) <= STRATEGIES[strategy].max_additions(*mesh_shape)


@pytest.mark.parametrize("strategy", ["ring", "parameter_server"])
def test_strategy_that_does_not_sum_along_axes_exceeds_the_additions_of_those_that_do(strategy):
    along_axes = dataclasses.replace(STRATEGIES[strategy], sums_along_axes=True)
    assert additions_of(strategy, (2, 4)) == 7 > along_axes.max_additions(2, 4)


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_all_reduce_mean_every_strategy_and_mesh_returns_mean(mesh_shape, strategy):
    devices = mesh_shape[0] * mesh_shape[1]
    inputs = random_tree(SHAPES, devices)
    for name, value in reduce_mean(inputs, mesh_shape, strategy, bucket_bytes=BUCKET_SIZES[mesh_shape]).items():
        assert value.shape == SHAPES[name]
        assert_mean(value, inputs[name])


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize(("wire", "unit"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_all_reduce_mean_16_bit_wire_error_is_within_rounding(strategy, wire, unit):
    """Eight values are each rounded once, and their partial sums at most seven times, by at most `unit` of what is rounded."""
    inputs = random_tree(SHAPES, 8)
    for name, value in reduce_mean(inputs, (2, 4), strategy, jnp.dtype(wire)).items():
        assert value.dtype == jnp.float32
        assert_replicated(value)
        bound = ((1 + unit) ** 8 - 1) * np.abs(inputs[name]).mean(0, dtype=np.float64) + 8 * 2**-25  # fp16's subnormals
        error = np.abs(value - inputs[name].astype(np.float64).mean(0))
        assert np.all(error <= bound)
        if value.size > 100:
            assert error.max() > unit / 64  # it did travel in 16 bits


def test_all_reduce_mean_wire_dtype_set_leaf_keeps_its_dtype():
    inputs = {"half": np.ones((8, 3), jnp.bfloat16), "single": np.ones((8, 3), np.float32)}
    out = reduce_mean(inputs, (2, 4), "torus", jnp.float16, bucket_bytes=None)
    assert (out["half"].dtype, out["single"].dtype) == (jnp.bfloat16, jnp.float32)


def leaves_of(*sizes, dtype=np.float32):
    return [np.zeros(size, dtype) for size in sizes]


def test_leaf_buckets_large_tensor_gets_its_own_bucket():
    assert allreduce.leaf_buckets(leaves_of(3, 5, 2, 100, 8, 1), bucket_bytes=40) == [[0, 1, 2], [3], [4, 5]]
    assert allreduce.leaf_buckets(leaves_of(3, 5, 2, 100, 8, 1), bucket_bytes=None) == [[0, 1, 2, 3, 4, 5]]
    assert allreduce.leaf_buckets(leaves_of(3, 5), bucket_bytes=1) == [[0], [1]]
    assert allreduce.leaf_buckets(leaves_of(1, 10, 1), bucket_bytes=40) == [[0, 2], [1]]  # of just that size: alone


def test_leaf_buckets_wire_dtype_determines_size_and_dtypes_are_separate():
    assert allreduce.leaf_buckets(leaves_of(10, 10), bucket_bytes=40, wire_dtype=jnp.bfloat16) == [[0, 1]]
    assert allreduce.leaf_buckets(leaves_of(10, 10), bucket_bytes=40) == [[0], [1]]
    mixed = [*leaves_of(1), *leaves_of(1, dtype=np.float16), *leaves_of(1)]
    assert allreduce.leaf_buckets(mixed, bucket_bytes=None) == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("no_strategy", {}, ", ".join(STRATEGIES)),
        ("torus", {"wire_dtype": jnp.int8}, "wire_dtype.*'int8'.*float32, bfloat16, float16"),
        ("torus", {"wire_dtype": "float17"}, "wire_dtype='float17'.*float32, bfloat16, float16"),
        (None, {}, "strategy=None: invalid choice"),
        (["torus"], {}, r"strategy=\['torus'\]: invalid choice"),
        ("torus", {"bucket_bytes": 0}, "bucket_bytes=0: must be positive"),
        ("torus", {"bucket_bytes": "64"}, "bucket_bytes='64': must be positive"),
    ],
)
@pytest.mark.parametrize("reduce", [allreduce.all_reduce_mean, allreduce.pack_buckets])
def test_all_reduce_mean_invalid_argument_raises_config_error(reduce, strategy, options, message):
    with pytest.raises(ConfigError, match=message):
        reduce({}, strategy, **options)


@pytest.mark.parametrize(("mesh_shape", "allowed"), [((2, 32), True), ((2, 33), False), ((33, 2), False), ((1, 65), False)])
def test_strategy_is_refused_on_more_devices_than_it_supports(mesh_shape, allowed):
    mapped = jax.shard_map(
        lambda x: allreduce.all_reduce_sum(x, "parameter_server"),
        mesh=abstract_mesh(*mesh_shape),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    devices = mesh_shape[0] * mesh_shape[1]
    refused = pytest.raises(ConfigError, match=f"cannot run on {devices} devices: parameter_server supports at most 64")
    with contextlib.nullcontext() if allowed else refused:
        jax.eval_shape(mapped, jnp.zeros(3))


@pytest.mark.parametrize("axes", [(), (HORIZONTAL,), (VERTICAL,), AXES], ids=str)
def test_values_equal_along_an_axis_are_refused_until_they_are_marked(axes):
    """Where JAX tracks along which axes the devices may differ."""

    def per_device(x, mark):
        tree = {"x": mark(x), "y": lax.pcast(jnp.zeros(2), AXES, to="varying")}
        assert all(jax.typeof(leaf).manual_axis_type.varying == set(AXES) for leaf in allreduce.varying(tree).values())
        return allreduce.all_reduce_sum(tree)["x"]

    def total(mark):
        specs = {"in_specs": PartitionSpec(axes), "out_specs": PartitionSpec(), "check_vma": True}
        mapped = jax.shard_map(partial(per_device, mark=mark), mesh=make_mesh(2, 4), **specs)
        return jax.jit(mapped)(np.arange(8.0, dtype=np.float32)).sum()

    assert total(allreduce.varying) == 28 * 8 / np.prod([{HORIZONTAL: 4, VERTICAL: 2}[axis] for axis in axes])
    with contextlib.nullcontext() if axes == AXES else pytest.raises(ConfigError, match="that is equal on all devices"):
        total(lambda x: x)


def test_jax_verifies_the_strategies_of_psums_along_axes_alone():
    verified = {name for name in STRATEGIES if allreduce.check_vma(name)}
    assert verified >= {"psum", "hierarchical", "torus"}
    assert verified.isdisjoint({"ring", "parameter_server"})
    assert not any(allreduce.check_vma(other) for other in (allreduce.psum, "no_strategy", None))


def test_hierarchical_all_reduces_are_not_merged():
    """The one along the rows is done before the one along the columns begins."""
    mapped = jax.shard_map(
        lambda x: allreduce.all_reduce_sum(x[0], "hierarchical"),
        mesh=make_mesh(2, 4),
        in_specs=PartitionSpec(AXES),
        out_specs=PartitionSpec(),
    )
    traced = jax.jit(mapped).trace(jnp.zeros((8, 5)))
    assert "optimization_barrier" in traffic.primitives(traced.jaxpr)
    found = read_schedule(traced.lower().compile().as_text(), 8).collectives
    assert [(one.operation, len(one.groups)) for one in found] == [("all-reduce", 2), ("all-reduce", 4)]


def test_reduced_buckets_are_given_to_audits_with_their_tree():
    tree, sent = {"a": jnp.zeros(3), "b": jnp.zeros(2)}, []
    specs = {"mesh": make_mesh(1, 1), "in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
    jax.eval_shape(jax.shard_map(partial(allreduce.reduce_tree, strategy=allreduce.psum, sent=sent), **specs), tree)
    ((given, (bucket,)),) = sent
    assert (set(given), bucket.indices, bucket.contribution.size) == ({"a", "b"}, [0, 1], 5)


NO_FLOAT_ARRAYS = {
    "type float": 1.0,
    "type int": 1,
    "type bool": True,
    "type complex": 1j,
    "type str": "1.0",
    "type ShapeDtypeStruct": jax.ShapeDtypeStruct((3,), jnp.float32),
    "dtype int32": jnp.zeros(3, jnp.int32),
    "dtype int64": np.int64(1),
    "dtype bool": np.zeros(3, bool),
    "dtype complex64": jnp.zeros(3, jnp.complex64),
    "dtype key": jax.random.key(0),
    "dtype object": np.array([None]),
}


@pytest.mark.parametrize("reduce", [allreduce.all_reduce_mean, allreduce.all_reduce_sum])
@pytest.mark.parametrize("kind", NO_FLOAT_ARRAYS)
def test_leaf_that_is_no_float_array_raises_config_error(kind, reduce):
    with pytest.raises(ConfigError, match=f"tree: has a leaf of {kind}.*; .*floating-point"):
        reduce({"fine": jnp.zeros(3), "other": [NO_FLOAT_ARRAYS[kind]]}, "psum")


def test_numpy_values_are_summed_and_none_is_no_leaf():
    def per_device(x):
        return allreduce.all_reduce_sum({"x": x[0], "scalar": np.float32(2), "array": np.full(2, 0.5), "none": None})

    rows, everywhere = PartitionSpec(AXES), PartitionSpec()
    specs = {"in_specs": rows, "out_specs": everywhere, "check_vma": False}
    out = jax.jit(jax.shard_map(per_device, mesh=make_mesh(2, 4), **specs))(np.arange(8, dtype=np.float32))
    assert (float(out["x"]), float(out["scalar"]), out["array"].tolist(), out["none"]) == (28.0, 16.0, [4.0, 4.0], None)


@pytest.mark.parametrize("strategy", [*sorted(STRATEGIES.keys() - {"torus"}), allreduce.psum])
def test_strategy_that_does_not_scatter_cannot_leave_shards(strategy):
    with pytest.raises(ConfigError, match=r"strategy=.*: invalid choice; choose from torus$"):
        allreduce.all_reduce_sum(jnp.zeros(3), strategy, sharded=True)


def test_all_reduce_outside_of_a_mesh_raises_config_error():
    with pytest.raises(ConfigError, match=r"tree: there is no mesh with the axes vertical and horizontal here; .*shard_map"):
        allreduce.all_reduce_sum(jnp.zeros(3))


def gradient_of_mean(check_vma, mark=lambda params: params):
    """d mean(w x) / dw = mean(x) for one row of x on each device."""

    def per_device(weight, x):
        gradient = jax.grad(lambda weight: (weight * x).mean())(mark(weight))
        return allreduce.all_reduce_mean(gradient)

    rows, everywhere = PartitionSpec(AXES), PartitionSpec()
    specs = {"in_specs": (everywhere, rows), "out_specs": everywhere, "check_vma": check_vma}
    return jax.jit(jax.shard_map(per_device, mesh=make_mesh(2, 4), **specs))(jnp.float32(2.0), jnp.arange(8.0))


def test_a_gradient_that_jax_has_summed_itself_is_not_summed_again():
    """Its mean over the devices would be their number times too large."""
    with pytest.raises(ConfigError, match=r"equal on all devices, as a gradient that JAX has summed itself; .*check_vma=False"):
        gradient_of_mean(check_vma=True)
    assert gradient_of_mean(check_vma=False) == 3.5
    assert gradient_of_mean(check_vma=True, mark=lambda weight: jax.lax.pcast(weight, AXES, to="varying")) == 3.5


def in_fixed_point(vector):
    """A sum whose own derivative would be 0."""
    return lax.psum(jnp.round(vector * 2**20).astype(jnp.int32), AXES).astype(vector.dtype) / 2**20


def stages_of_the_torus(tree):
    """Stages that a user combines."""

    def reduce(leaf):
        vector = leaf.ravel()
        for stage in allreduce.stages_of("torus"):
            vector = stage(vector)
        return vector[: leaf.size].reshape(leaf.shape)

    return jax.tree.map(reduce, tree)


def derivatives(reductions, mesh_shape, check_vma):
    """By name, on every device: gradient, forward derivative and derivative of the gradient of a loss with a reduction."""
    mesh = make_mesh(*mesh_shape)
    x, tangent, weight = np.random.default_rng(0).normal(size=(3, mesh.size, 7)).astype(np.float32)

    def loss(x, weight, reduce):
        sums = jax.tree.leaves(reduce({"a": jnp.sin(x[0]), "b": x[:, :3] ** 2}))
        return sum((leaf * weight[0, 0] * jnp.arange(1.0, leaf.size + 1)).sum() for leaf in sums)

    def per_device(x, tangent, weight):
        each = {}
        for name, reduce in reductions.items():
            of_x = partial(loss, weight=weight, reduce=reduce)
            gradient, second = jax.jvp(jax.grad(of_x), (x,), (tangent,))
            each[name] = gradient, jax.jvp(of_x, (x,), (tangent,))[1][None], second
        return each

    rows = PartitionSpec(AXES)
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma)
    return jax.jit(mapped)(x, tangent, weight)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    "mesh_shape", [pytest.param(one, marks=[] if one == (2, 4) else pytest.mark.slow) for one in (*MESHES, (3, 2))]
)
def test_derivative_of_every_strategy_is_that_of_pmean_and_psum(mesh_shape, check_vma, monkeypatch):
    set_stages(monkeypatch, "mine", in_fixed_point)
    expected = {"mean": partial(lax.pmean, axis_name=AXES), "sum": partial(lax.psum, axis_name=AXES)}
    expected |= {"sharded": lambda tree: jax.tree.map(own_shard, lax.psum(tree, AXES))}
    ours = {
        "sum of stages": stages_of_the_torus,
        "sum of a function": partial(allreduce.all_reduce_sum, strategy=in_fixed_point),
    }
    ours |= {"sharded sum": partial(allreduce.all_reduce_sum, sharded=True)}
    for name, strategy in STRATEGIES.items():
        if not check_vma or strategy.check_vma or name == "mine":
            options = {"strategy": name, "wire_dtype": "bfloat16" if name == "psum" else None}
            ours |= {f"mean by {name}": partial(allreduce.all_reduce_mean, **options)}
            ours |= {f"sum by {name}": partial(allreduce.all_reduce_sum, **options)}
    found = derivatives(expected | ours, mesh_shape, check_vma)
    for name in ours:
        for one, other in zip(found[name], found[name.split()[0]], strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-5 * np.abs(other).max(), err_msg=name)


@pytest.mark.parametrize("strategy", ["ring", "parameter_server"])
def test_derivative_of_a_sum_that_jax_cannot_verify_is_refused_where_it_verifies(strategy):
    """`lax.psum` has the gradient of one copy of the sum there; of a sum on every device it would be N times as large."""
    with pytest.raises(ConfigError, match=rf"strategy='{strategy}': cannot be differentiated here.*; .*check_vma=False"):
        derivatives({"mean": partial(allreduce.all_reduce_mean, strategy=strategy)}, (2, 4), check_vma=True)


PRINT_RING_BITS = """
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES, make_mesh

mesh = make_mesh(2, 4)
inputs = np.random.default_rng(0).normal(size=(8, 1001)).astype(np.float32)
here = NamedSharding(mesh, PartitionSpec(AXES))
array = jax.make_array_from_callback(inputs.shape, here, lambda index: inputs[index])
reduce = jax.shard_map(
    lambda x: allreduce.all_reduce_mean(x[0], "ring"),
    mesh=mesh,
    in_specs=PartitionSpec(AXES),
    out_specs=PartitionSpec(),
    check_vma=False,
)
for shard in jax.jit(reduce)(array).addressable_shards:
    print("bits", np.asarray(shard.data).tobytes().hex())
"""


@pytest.mark.slow
def test_ring_of_two_processes_returns_the_bits_of_one(over_processes):
    here = np.asarray(reduce_mean(random_tree({"x": (1001,)}, 8), (2, 4), "ring")["x"])
    lines = [line for lines in over_processes(PRINT_RING_BITS, 2) for line in lines if line.startswith("bits")]
    assert len(lines) == 8
    digests = {hashlib.sha256(bytes.fromhex(line.split()[1])).hexdigest() for line in lines}
    assert digests == {hashlib.sha256(here.tobytes()).hexdigest()}
