"""Batch normalization with ReLU: separate, folded into 1x1 convolutions, with a factor on a branch; against Flax in float64."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.models import resnet
from jaxdp.models.batch_norm import BatchNormTerm, Fusion, Normalization, OneValue, moments, moments_in_one_reduction
from jaxdp.models.bn_relu import bn_relu, centered_bn_relu, fused_bn_relu, pack, relu_by_sqrt
from jaxdp.models.folded_batch_norm import FoldedTerm, InputMoments, Projection
from jaxdp.models.gated_bn_relu import fused_gated_bn_relu, gated_bn_relu
from jaxdp.parallel.forward_dtypes import inner_jaxprs
from jaxdp.parallel.mesh import AXES, make_mesh

SMALL, LARGE = (16, 5, 4, 8), (64, 8, 32, 128)  # batch, side, channels in and out
FOLDED = {"with a shortcut": ("F", True), "two": ("FF", False), "beside a separate one": ("PF", False), "alone": ("F", False)}
SEPARATE = {"separate": ("P", False), "separate with a shortcut": ("P", True), "two separate": ("PP", False)}
CASES = FOLDED | SEPARATE


def random_case(kinds: str, shortcut: bool, mean=0.5, std=1.0, sizes=SMALL):
    """([{"tensor", "scale", "bias", and "kernel" where it is folded} by term], shortcut or None, a cotangent), float64."""
    rng = np.random.default_rng(0)
    batch, side, inputs, outputs = sizes

    def term(kind):
        channels = inputs if kind == "F" else outputs
        tensor = np.maximum(rng.normal(mean, std, (batch, side, side, channels)), 0)
        found = {"tensor": tensor, "scale": rng.uniform(0.5, 2, outputs), "bias": rng.normal(size=outputs)}
        return found | ({"kernel": rng.normal(size=(inputs, outputs))} if kind == "F" else {})

    shape = (batch, side, side, outputs)
    return [term(kind) for kind in kinds], rng.normal(size=shape) if shortcut else None, rng.normal(size=shape)


def flax_norm(term):
    norm = nn.BatchNorm(use_running_average=False, epsilon=1e-5, dtype=jnp.float64, param_dtype=jnp.float64)
    x = term["tensor"] @ term["kernel"] if "kernel" in term else term["tensor"]
    variables = {
        "params": {"scale": term["scale"], "bias": term["bias"]},
        "batch_stats": {"mean": jnp.zeros_like(term["bias"]), "var": jnp.ones_like(term["bias"])},
    }
    return norm.apply(variables, x, mutable=["batch_stats"])[0]


def flax_bn_relu(terms, shortcut):
    return jnp.maximum(sum(map(flax_norm, terms)) + (0 if shortcut is None else shortcut), 0)


def separate(term, axes=()):
    x = term["tensor"]
    if "kernel" in term:
        x = x @ term["kernel"].astype(x.dtype)
    mean, square = moments(lax.stop_gradient(x), axes)
    return BatchNormTerm(x, Normalization(term["scale"], term["bias"], mean, jnp.maximum(square - mean * mean, 0.0)))


def folded(term, axes=(), center=None):
    if "kernel" not in term:
        return separate(term, axes)
    projection = Projection(term["tensor"], term["kernel"], center)
    inputs = InputMoments.of(lax.stop_gradient(projection.h))
    mean, square = inputs.projected(lax.stop_gradient(projection.rounded_kernel), axes)
    norm = Normalization(term["scale"], term["bias"], mean, jnp.maximum(square - mean * mean, 0.0))
    return FoldedTerm(projection, inputs, norm)


def jaxdp_bn_relu(terms, shortcut, *, form=folded, axes=(), convolution="direct"):
    return fused_bn_relu(Fusion(axes, convolution), tuple(form(term, axes) for term in terms), shortcut)


@partial(jax.jit, static_argnums=0)
def value_and_gradient(function, *arguments):
    *primals, cotangent = arguments
    value, vjp_fn = jax.vjp(function, *primals)
    return value, vjp_fn(cotangent)


def in_float64(terms, shortcut, cotangent):
    """(value, gradients) by Flax in float64."""
    with jax.enable_x64():
        return jax.tree.map(np.asarray, value_and_gradient(flax_bn_relu, terms, shortcut, cotangent))


def narrow(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def errors(found, wanted):
    """The relative error of every leaf."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return [float(np.linalg.norm(np.asarray(one, np.float64) - other) / np.linalg.norm(other)) for one, other in pairs]


@pytest.mark.parametrize("convolution", ["direct", "cudnn", "product"])
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_match_flax_in_float64(case, convolution):
    terms, shortcut, cotangent = random_case(*CASES[case])
    expected, wanted = in_float64(terms, shortcut, cotangent)
    function = partial(jaxdp_bn_relu, convolution=convolution)
    found, gradient = value_and_gradient(function, *narrow((terms, shortcut, cotangent)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert max(errors(gradient, wanted)) <= 1e-5


def derived_terms(terms):
    """Terms whose gradient JAX derives."""
    found = []
    for term in terms:
        mean, square = moments(term["tensor"])
        found.append(BatchNormTerm(term["tensor"], Normalization(term["scale"], term["bias"], mean, square - mean * mean)))
    return tuple(found)


def derived_bn_relu(terms, shortcut):
    return bn_relu(derived_terms(terms), shortcut)


FORMS = {
    "direct": jaxdp_bn_relu,
    "cudnn": partial(jaxdp_bn_relu, convolution="cudnn"),
    "product": partial(jaxdp_bn_relu, convolution="product"),
    "autodiff": derived_bn_relu,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", SEPARATE)
def test_gradients_of_scale_and_bias_in_bfloat16_are_summed_in_float32(case, form):
    """Of inputs that are exact in bfloat16: far below its rounding of 2^-9, which one sum or one product in it would have."""
    terms, shortcut, cotangent = jax.tree.map(partial(rounded_to, jnp.bfloat16), random_case(*SEPARATE[case]))
    _, (wanted, _) = in_float64(terms, shortcut, cotangent)

    def narrow(array):
        return jnp.asarray(array, jnp.bfloat16 if array.ndim > 1 else jnp.float32)

    terms, shortcut, cotangent = jax.tree.map(narrow, (terms, shortcut, cotangent))
    found, _ = jax.vjp(FORMS[form], terms, shortcut)[1](cotangent)  # compiled, XLA may leave out a rounding
    for ours, expected in zip(found, wanted, strict=True):
        assert max(errors(*({name: term[name] for name in ("scale", "bias")} for term in (ours, expected)))) <= 1e-5


@pytest.mark.parametrize("convolution", ["direct", "cudnn", "product"])
@pytest.mark.parametrize("case", CASES)
def test_derivative_of_the_relu_is_zero_at_zero(case, convolution):
    """As of `jax.nn.relu` and in PyTorch: of blocks whose last scale begins at 0, with a shortcut of 0."""
    terms, shortcut, cotangent = narrow(random_case(*CASES[case]))
    terms = [term | {name: jnp.zeros_like(term[name]) for name in ("scale", "bias")} for term in terms]
    shortcut = None if shortcut is None else jnp.zeros_like(shortcut)
    value, gradient = value_and_gradient(partial(jaxdp_bn_relu, convolution=convolution), terms, shortcut, cotangent)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((value, gradient)))


# The separate masks of one term and of the written output, and the barriers that keep XLA from computing them twice.
@pytest.mark.parametrize(
    ("case", "convolution", "expected"),
    [
        ("separate", "direct", {"sign", "optimization_barrier"}),
        ("separate", "product", set()),
        ("two separate", "direct", {"optimization_barrier"}),
        ("two separate", "product", {"sqrt", "optimization_barrier"}),
        ("separate", "cudnn", {"sign", "optimization_barrier"}),
        ("two separate", "cudnn", {"shift_left", "shift_right_logical", "optimization_barrier"}),
        ("beside a separate one", "cudnn", {"optimization_barrier"}),  # its ReLU is the convolution's
        ("7 channels", "cudnn", {"optimization_barrier"}),
    ],
)
def test_program_of_a_relu_is_that_of_its_platform(case, convolution, expected):
    arguments = CASES.get(case, ("PP", False, 0.5, 1.0, (16, 5, 4, 7)))
    terms, shortcut, cotangent = narrow(random_case(*arguments))
    function = partial(jaxdp_bn_relu, convolution=convolution)
    jaxpr = jax.make_jaxpr(lambda terms: jax.vjp(lambda terms: function(terms, shortcut), terms)[1](cotangent))(terms).jaxpr
    masks = {"sign", "sqrt", "optimization_barrier", "shift_left", "shift_right_logical"}
    assert {e.primitive.name for e in jaxpr_equations(jaxpr)} & masks == expected


def test_mask_is_packed_as_by_numpy():
    mask = np.random.default_rng(0).random((2, 3, 5, 24)) < 0.5
    np.testing.assert_array_equal(pack(jnp.asarray(mask)), np.packbits(mask, axis=-1, bitorder="little"))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_one_value_of_each_channel_names_the_field(shape):
    layer, x = resnet.BatchNorm(train=True), jnp.ones((*shape, 4))
    variables = layer.init(jax.random.key(0), x)
    if x.size > 4:
        layer.apply(variables, x, mutable=["batch_stats"])
        return
    with pytest.raises(OneValue, match=r"^per_worker_batch=1: .* has one value of each channel"):
        layer.apply(variables, x, mutable=["batch_stats"])


def test_relu_by_sqrt_equals_relu_bitwise():
    rng = np.random.default_rng(0)
    values = np.concatenate([[0.0, np.nan], rng.choice([-1, 1], 10**6) * np.exp(rng.uniform(-43, 43, 10**6))])
    np.testing.assert_array_equal(jax.jit(relu_by_sqrt)(values.astype(np.float32)), np.maximum(values.astype(np.float32), 0))


def test_moments_in_one_reduction_equal_moments():
    x = jnp.asarray(np.random.default_rng(0).normal(2.0, 3.0, (16, 5, 5, 7)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    for found in (moments(x), moments_in_one_reduction(x)):
        np.testing.assert_allclose(found, (wide.mean((0, 1, 2)), (wide**2).mean((0, 1, 2))), rtol=1e-6)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_gradient_of_a_cotangent_that_is_not_finite_is_not_finite(value):
    """Also where the ReLU is zero, so that a step with an overflow is skipped."""
    terms, _, cotangent = narrow(random_case("P", False))
    y, vjp_fn = jax.vjp(partial(jaxdp_bn_relu, shortcut=None), terms)
    for positive in (True, False):
        place = tuple(np.argwhere(np.asarray(y > 0) == positive)[0])
        (gradient,) = vjp_fn(cotangent.at[place].set(value))[0]
        assert not np.isfinite(gradient["tensor"][place])
        assert not np.isfinite(gradient["scale"][place[-1]])


@pytest.mark.parametrize("case", CASES)
def test_synchronized_over_devices_equals_whole_batch(case):
    terms, shortcut, cotangent = random_case(*CASES[case])
    expected, wanted = in_float64(terms, shortcut, cotangent)
    mesh, rows, everywhere = make_mesh(2, 4), PartitionSpec(AXES), PartitionSpec()
    specs = [{name: rows if name == "tensor" else everywhere for name in term} for term in terms]

    def on_each(terms, shortcut, cotangent):
        varying = [
            {name: leaf if name == "tensor" else lax.pcast(leaf, AXES, to="varying") for name, leaf in term.items()}
            for term in terms
        ]
        value, vjp_fn = jax.vjp(partial(jaxdp_bn_relu, axes=AXES), varying, shortcut)
        gradient, shortcut = vjp_fn(cotangent)
        summed = [
            {name: leaf if name == "tensor" else lax.psum(leaf, AXES) for name, leaf in term.items()} for term in gradient
        ]
        return value, (summed, shortcut)

    mapped = jax.shard_map(on_each, mesh=mesh, in_specs=(specs, rows, rows), out_specs=(rows, (specs, rows)))
    found, gradient = jax.jit(mapped)(*narrow((terms, shortcut, cotangent)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert max(errors(gradient, wanted)) <= 1e-5


def rounded_to(dtype, leaf):
    return np.asarray(jnp.asarray(leaf, dtype), np.float64)


def pair_case(mean, std, dtype):
    """(a separate term, a folded term of its ReLU without the tensor, a cotangent); std 0: equal rows.

    mean: of the ReLU, std: of it before the ReLU. The cotangent has no gradient near the kink of the second ReLU.
    """
    rng = np.random.default_rng(0)
    batch, side, inputs, outputs = LARGE
    x = rng.normal(size=(batch, side, side, inputs) if std else inputs)
    x = np.broadcast_to(rounded_to(dtype, x), (batch, side, side, inputs))
    first = {"tensor": x, "scale": (std or 1.0) * rng.uniform(0.5, 2, inputs), "bias": np.full(inputs, mean)}
    bias = np.where(rng.random(outputs) < 0.5, 20.0, -20.0)
    kernel = rounded_to(dtype, rng.normal(size=(inputs, outputs)))
    second = {"scale": rng.uniform(0.5, 2, outputs), "bias": bias, "kernel": kernel}
    return first, second, rounded_to(dtype, rng.normal(size=(batch, side, side, outputs)))


def flax_pair(first, second):
    return flax_bn_relu([second | {"tensor": flax_bn_relu([first], None)}], None)


def jaxdp_pair(first, second, *, convolution):
    """As in a bottleneck block: the ReLU is written around its center."""
    fusion, term = Fusion((), convolution), separate(first)
    h = centered_bn_relu(fusion, term)
    return fused_bn_relu(fusion, (folded(second | {"tensor": h}, center=term.norm.center_behind_relu),))


def pair_errors(mean, std, dtype, convolution):
    """Relative errors of the value and the gradients."""
    first, second, cotangent = pair_case(mean, std, dtype)
    with jax.enable_x64():
        expected, (wanted, wanted_second) = jax.tree.map(np.asarray, value_and_gradient(flax_pair, first, second, cotangent))
    inputs = narrow(first) | {"tensor": jnp.asarray(first["tensor"], dtype)}
    function = partial(jaxdp_pair, convolution=convolution)
    found, (gradient, second_gradient) = value_and_gradient(function, inputs, narrow(second), jnp.asarray(cotangent, dtype))
    pairs = {"value": (found, expected)}
    if std:  # else the gradients are zero, or divide by a variance of zero
        pairs |= {name: (second_gradient[name], wanted_second[name]) for name in ("kernel", "scale")}
        pairs |= {f"first {name}": (gradient[name], wanted[name]) for name in ("tensor", "scale")}
    return {name: errors([one], [other])[0] for name, (one, other) in pairs.items()}


HARD = [(5.0, 0.0), (5.0, 1e-3), (5.0, 1e-2), (30.0, 1.0), (0.0, 1.0), (-2.0, 1.0)]


@pytest.mark.parametrize(
    ("mean", "std", "dtype", "convolution"),
    [
        *((*hard, jnp.bfloat16, "direct") for hard in HARD),
        *((*hard, dtype, form) for hard in HARD[2:4] for dtype, form in ((jnp.bfloat16, "product"), (jnp.float16, "direct"))),
    ],
)
def test_behind_a_relu_no_mean_costs_precision_in_16_bits(mean, std, dtype, convolution):
    """The separate form has errors of 70 % with a mean of 5 and a standard deviation of 0.01."""
    assert max(pair_errors(mean, std, dtype, convolution).values()) <= float(jnp.finfo(dtype).eps)


# Without float16 where the rounding of the covariance in float32 is larger.
BIASED = [(jnp.bfloat16, std) for std in (0.0, 1e-2, 1.0)] + [(jnp.float16, std) for std in (0.0, 1.0)]


@pytest.mark.parametrize(("dtype", "std"), BIASED)
def test_bias_is_float32_where_convolutions_are_products(dtype, std):
    """Without a center, as in a shortcut."""
    rng = np.random.default_rng(0)
    (term,), _, cotangent = random_case("F", False, 5.0, std, LARGE)
    if not std:
        term["tensor"] = np.broadcast_to(rng.normal(5.0, 1.0, LARGE[2]), term["tensor"].shape)
    term = term | {name: rounded_to(dtype, term[name]) for name in ("tensor", "kernel")}
    expected, _ = in_float64([term], None, cotangent)
    inputs = narrow(term) | {"tensor": jnp.asarray(term["tensor"], dtype)}
    found = jax.jit(partial(jaxdp_bn_relu, convolution="product"))([inputs], None)
    assert errors([found], [expected])[0] <= float(jnp.finfo(dtype).eps)


def orthogonal_case(mean, constant_channels=0):
    """A folded term whose kernel is orthogonal to the mean of its input, and a cotangent that correlates with its result."""
    rng = np.random.default_rng(0)
    (term,), _, cotangent = random_case("F", False, mean, 1.0, LARGE)
    term["tensor"][..., :constant_channels] = mean
    term["kernel"] -= term["kernel"].mean(0)
    x = term["tensor"] @ term["kernel"]
    deviation = (x - x.mean((0, 1, 2))) / x.std((0, 1, 2))
    term["bias"] = np.where(rng.random(len(term["bias"])) < 0.5, 20.0, -20.0)  # no result is near the kink of the ReLU
    return [term], None, cotangent + deviation


def covariance_error(term):
    """The relative error of the variance of a folded term's result, as docs/performance.md states it."""
    size = np.abs(term["tensor"].mean((0, 1, 2))) @ np.abs(term["kernel"])
    variance = (term["tensor"] @ term["kernel"]).var((0, 1, 2)) + 1e-5
    return float(jnp.finfo(jnp.float32).eps) * float((size**2 / variance).max())


@pytest.mark.parametrize(("mean", "constant_channels"), [(3.0, 0), (30.0, 0), (100.0, 0), (3.7, 16)])
def test_error_of_float32_is_that_of_the_covariance(mean, constant_channels):
    """The variance loses what |mean(h)| |W| exceeds the standard deviation of the result by, squared; docs state this."""
    terms, shortcut, cotangent = orthogonal_case(mean, constant_channels)
    (term,) = terms
    expected, wanted = in_float64(terms, shortcut, cotangent)
    found, gradient = value_and_gradient(jaxdp_bn_relu, *narrow((terms, shortcut, cotangent)))
    limit = covariance_error(term)
    assert errors([found], [expected])[0] <= limit
    error = dict(zip(("bias", "kernel", "scale", "tensor"), errors(gradient, wanted), strict=True))
    assert error.pop("kernel") <= 16 * limit  # a difference of two large products with the mean
    assert max(error.values()) <= limit


def test_moments_in_bfloat16_are_those_of_the_rounded_kernel():
    """As evaluation and the separate form compute the convolution."""
    (term,), *_ = random_case("F", False, 3.0, sizes=LARGE)
    h = jnp.asarray(term["tensor"], jnp.bfloat16)
    projection = Projection(h, jnp.asarray(term["kernel"], jnp.float32))
    mean, square = InputMoments.of(h).projected(jax.jit(lambda: projection.rounded_kernel)())
    x = np.asarray(h, np.float64) @ rounded_to(jnp.bfloat16, term["kernel"])
    np.testing.assert_allclose(mean, x.mean((0, 1, 2)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(square, (x * x).mean((0, 1, 2)), rtol=1e-5)


def test_products_in_float32_state_their_precision():
    """A GPU would compute them with TF32 otherwise."""
    terms, shortcut, cotangent = narrow(random_case("FF", True))

    def gradient(terms, shortcut):
        return jax.vjp(jaxdp_bn_relu, terms, shortcut)[1](cotangent)

    products = [
        eqn for eqn in jaxpr_equations(jax.make_jaxpr(gradient)(terms, shortcut).jaxpr) if eqn.primitive.name == "dot_general"
    ]
    assert len(products) >= 12
    assert {eqn.params["precision"] for eqn in products} == {(lax.Precision.HIGHEST, lax.Precision.HIGHEST)}


def jaxpr_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from jaxpr_equations(inner)


def flax_gated(terms, shortcut, gate):
    branch, *others = map(flax_norm, terms)
    return jnp.maximum(gate * branch + sum(others) + (0 if shortcut is None else shortcut), 0)


def jaxdp_gated(terms, shortcut, gate, fusion=Fusion()):  # noqa: B008 - immutable
    return fused_gated_bn_relu(fusion, tuple(separate(term, fusion.axes) for term in terms), gate, shortcut)


def derived_gated(terms, shortcut, gate):
    return gated_bn_relu(derived_terms(terms), gate, shortcut)


GATED = {
    "direct": jaxdp_gated,
    "product": partial(jaxdp_gated, fusion=Fusion(convolution="product")),
    "autodiff": derived_gated,
}


def gated_case(kinds, shortcut):
    """As `random_case`, with a factor for each image, which is 0 for some images."""
    rng, (terms, shortcut, cotangent) = np.random.default_rng(1), random_case(kinds, shortcut)
    shape = (len(cotangent), 1, 1, 1)
    return terms, shortcut, rng.uniform(0.2, 2, shape) * (rng.random(shape) < 0.7), cotangent


@pytest.mark.parametrize("form", GATED)
@pytest.mark.parametrize("case", [("P", True), ("PP", False)], ids=["with a shortcut", "two terms"])
def test_factor_on_a_branch_matches_flax_in_float64(case, form):
    *arguments, cotangent = gated_case(*case)
    with jax.enable_x64():
        wanted = jax.tree.map(np.asarray, value_and_gradient(flax_gated, *arguments, jnp.asarray(cotangent)))
    found = value_and_gradient(GATED[form], *narrow((*arguments, cotangent)))
    assert max(errors(found, wanted)) <= 1e-5


def test_factor_on_a_branch_synchronized_over_devices_equals_the_whole_batch():
    terms, shortcut, gate, cotangent = narrow(gated_case("P", True))
    wanted = value_and_gradient(jaxdp_gated, terms, shortcut, gate, cotangent)[1]
    mesh, rows, everywhere = make_mesh(2, 4), PartitionSpec(AXES), PartitionSpec()

    def on_each(x, weights, shortcut, gate, cotangent):
        def value(x, weights, shortcut, gate):
            return jaxdp_gated([weights | {"tensor": x}], shortcut, gate, fusion=Fusion(AXES))

        _, vjp_fn = jax.vjp(value, x, lax.pcast(weights, AXES, to="varying"), shortcut, gate)
        x, weights, shortcut, gate = vjp_fn(cotangent)
        return x, lax.psum(weights, AXES), shortcut, gate

    (term,) = terms
    specs = (rows, everywhere, rows, rows)
    mapped = jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=(*specs, rows), out_specs=specs))
    x, weights, *others = mapped(term.pop("tensor"), term, shortcut, gate, cotangent)
    assert max(errors(([weights | {"tensor": x}], *others), wanted)) <= 1e-5
