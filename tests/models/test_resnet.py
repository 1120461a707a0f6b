import dataclasses
from types import SimpleNamespace

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import models, register_model
from jaxdp.config import Config, Finetune, Model
from jaxdp.errors import ConfigError
from jaxdp.models import resnet
from jaxdp.models.convolution import CONVOLUTIONS
from jaxdp.models.folded_batch_norm import Projection
from jaxdp.models.resnet import TWO_BLOCKS, BatchNorm, Conv, ResNet
from jaxdp.models.summary import check_image_size, fewest_values, summary
from jaxdp.parallel.mesh import AXES


def initialize(config, size=32, seed=0):
    """(model, params, batch_stats)."""
    model = models.create(config)
    return model, *jax.jit(lambda: model.init(jax.random.key(seed), (size, size, 3)))()


def abstract_params(config, size, platform=None):
    """(model, params, batch_stats) as shapes: nothing is compiled."""
    model = models.create(config, platform)
    return model, *jax.eval_shape(lambda: model.init(jax.random.key(0), (size, size, 3)))


def test_classifier_starts_from_the_frequency_of_its_classes():
    """A sigmoid of -ln(K) is 1 / (1 + K); everything else starts as before."""
    config = Model(depth=TWO_BLOCKS, width=4, stem="small", classes=6)
    _, usual, _ = initialize(config, 8)
    _, params, _ = initialize(dataclasses.replace(config, classifier_bias="class_frequency"), 8)
    np.testing.assert_allclose(jax.nn.sigmoid(params.pop("fc_bias")), np.full(6, 1 / 7), rtol=1e-6)
    np.testing.assert_array_equal(usual.pop("fc_bias"), 0)
    jax.tree.map(np.testing.assert_array_equal, params, usual)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("depth", 19, "choose from 18, 34"),
        ("stem", "deeper", "did you mean deep"),
        ("classes", 0, "must be at least 1"),
        ("momentum", 1.5, "must be from 0 to 1"),
        ("drop_path", -0.5, "must be from 0 to 1"),
    ],
)
def test_module_with_a_value_that_it_does_not_know_is_refused(field, value, message):
    with pytest.raises(ConfigError, match=rf"^{field}={value!r}: .*{message}"):
        models.ResNet(**{"depth": 18, "classes": 6} | {field: value})


def test_module_takes_its_bounds_and_has_the_defaults_of_the_config():
    for bound in (0, 1):
        models.ResNet(depth=18, classes=1, width=1, momentum=bound, drop_path=bound)
    ours = models.create(Model(depth=18, classes=6)).module
    assert models.ResNet(depth=18, classes=6) == ours.clone(draws=True, convolution=None, momentum=0.9)  # as of PyTorch
    for norm, axes in (("per_worker", ()), ("synchronized", AXES)):
        assert models.create(Model(depth=18, classes=6, norm=norm)).module.axes == axes


@pytest.mark.parametrize("options", [{}, {"momentum": 0.8}], ids=str)
def test_module_updates_running_statistics_as_flax_does(options):
    """By default with the momentum of PyTorch, which Flax writes as 0.9."""
    images = jnp.asarray(np.random.default_rng(1).normal(2, 3, (8, 6, 6, 4)), jnp.float32)
    variables = {
        "params": {"scale": jnp.ones(4), "bias": jnp.zeros(4)},
        "batch_stats": {"mean": jnp.ones(4), "var": jnp.ones(4)},
    }
    _, ours = BatchNorm(train=True, **options).apply(variables, images, mutable=["batch_stats"])
    peer = nn.BatchNorm(use_running_average=False, **{"momentum": 0.9} | options)
    _, expected = peer.apply(variables, images, mutable=["batch_stats"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, expected)


def test_resnet_is_an_ordinary_module():
    """Weights are drawn with the deviations of Goyal et al., section 5.1; statistics change where they are mutable."""
    net, images = resnet.ResNet(depth=TWO_BLOCKS, classes=6, width=16, stem="small"), jnp.ones((2, 8, 8, 3))

    @jax.jit
    def initialized_and_applied(key):
        variables = net.init(key, images, train=True)
        return variables, net.apply(variables, images, train=True, mutable=["batch_stats"])

    variables, (_, changed) = initialized_and_applied(jax.random.key(0))
    kernel, head = variables["params"]["layer2_0"]["conv1"]["kernel"], variables["params"]["fc_kernel"]
    np.testing.assert_allclose(kernel.std(), np.sqrt(2 / (9 * 32)), rtol=0.05)
    np.testing.assert_allclose(head.std(), 0.01, rtol=0.2)
    assert variables.keys() == {"params", "batch_stats"}
    evaluated = jax.eval_shape(lambda: net.init(jax.random.key(0), images, train=False))
    assert jax.tree.structure(variables) == jax.tree.structure(evaluated)
    assert changed.keys() == {"batch_stats"}
    before, after = (tree["batch_stats"]["layer1_0"]["bn1"]["mean"] for tree in (variables, changed))
    assert (before != after).all()
    with pytest.raises(flax.errors.ModifyScopeVariableError):  # as Flax's own layer, which does not lose statistics
        jax.eval_shape(lambda: net.apply(variables, images, train=True))


# torchvision's published numbers
@pytest.mark.parametrize(
    ("depth", "parameters"),
    [
        (18, 11_689_512),
        (34, 21_797_672),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((101, 44_549_160), (152, 60_192_808))),
    ],
)
def test_every_depth_has_the_published_parameters(depth, parameters):
    _, params, _ = abstract_params(Model(depth=depth, classes=1000), 32)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameters


def test_summary_of_resnet_50_equals_published_parameters_and_macs():
    counted = summary(Model(depth=50, classes=1000), (224, 224, 3))
    sizes, segments = counted.pop("sizes"), counted.pop("segments")
    assert (sum(map(len, sizes.values())), sum(map(sum, sizes.values()))) == (161, 25_557_032)
    assert sorted(name for segment in segments for name in segment) == sorted(sizes)
    assert counted.pop("shapes") == counted.pop("trainable_shapes")
    assert counted.pop("outputs").shape == (1, 1000)
    assert counted == {
        "parameters": 25_557_032,
        "statistics": 53_120,
        "macs": 4_089_184_256,
        "decayed": {"tensors": 54, "parameters": 25_502_912},
        "not_decayed": {"tensors": 107, "parameters": 54_120},
    }


@pytest.mark.parametrize("depth", [18, 50])
def test_frozen_stages_are_the_stem_and_the_first_layers(depth):
    """What is trained is all that follows, also in a summary."""
    config = Model(depth=depth, width=8, classes=6, drop_path=0.1 * (depth == 50))
    model, *trees = abstract_params(config, 32)
    assert model.draws_for_each_image == (depth == 50)
    layers = {f"layer{n + 1}_{block}": n + 1 for n, count in enumerate(resnet.BLOCKS[depth]) for block in range(count)}
    frozen_from = {("conv1", "bn1"): 1, **{(name,): layer + 1 for name, layer in layers.items()}, ("fc_kernel", "fc_bias"): 9}
    for frozen in range(6):
        split = [tuple(one for one, stage in frozen_from.items() if (stage <= frozen) == first) for first in (True, False)]
        assert [*model.split_frozen(frozen)] == split
        names = {name for segment in split[1] for name in segment}
        trained = [{name: tree[name] for name in tree if name in names} for tree in trees]
        assert [model.trainable(tree, frozen) for tree in trees] == trained
    found = summary(config, (32, 32, 3), frozen_stages=2)
    _, segments = model.split_frozen(2)
    trained = tuple(model.trainable(tree, 2) for tree in trees)
    assert (found["shapes"], found["trainable_shapes"], found["segments"]) == (tuple(trees), trained, segments)
    sizes, statistics, every = ([leaf.size for leaf in jax.tree.leaves(tree)] for tree in (*trained, trees[0]))
    assert (found["statistics"], found["parameters"]) == (sum(statistics), sum(every))
    counts = [found["decayed"], found["not_decayed"]]
    assert [sum(one[kind] for one in counts) for kind in ("tensors", "parameters")] == [len(sizes), sum(sizes)]


def phase_of(batch, size, devices=1, accumulation=1):
    return SimpleNamespace(
        index=1,
        per_worker_batch=batch,
        image_size=size,
        devices=devices,
        accumulation=accumulation,
        global_batch=batch * devices * accumulation,
    )


@pytest.mark.parametrize("stem", ["imagenet", "small", "deep"])
@pytest.mark.parametrize("depth", [TWO_BLOCKS, 18])
def test_fewest_values_are_those_of_the_last_map(depth, stem):
    config = Config(model=Model(depth=depth, width=4, stem=stem, classes=6))
    model, params, stats = abstract_params(config.model, 32)

    def last_map(params, stats, x):
        for segment in model.segments[:-1]:
            x, _ = model.apply_segment(params, stats, x, segment=segment, train=False)
        return x

    synchronized = dataclasses.replace(config, model=dataclasses.replace(config.model, norm="synchronized"))
    for size in (2, 32, 33):
        images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
        _, height, width, _ = jax.eval_shape(last_map, params, stats, images).shape
        assert fewest_values(config, phase_of(3, size, devices=4)) == 3 * height * width
        assert fewest_values(synchronized, phase_of(1, size, devices=4)) == 4 * height * width
    stages = len(resnet.BLOCKS[depth])
    for frozen, values in ((stages, 4), (stages + 1, np.inf)):  # whose statistics are not of the batch
        assert fewest_values(dataclasses.replace(config, finetune=Finetune(frozen_stages=frozen)), phase_of(4, 1)) == values


class Products:
    """Multiply-adds by hand: of a batched product, of one inside a compiled function, and of a convolution in two groups."""

    def init(self, key, image_shape):
        return {"first": jnp.ones((5, 3, 4)), "second": jnp.ones((20, 6)), "kernel": jnp.ones((3, 3, 2, 8))}, {}

    def apply(self, params, batch_stats, images, train):
        hidden = jax.lax.conv_general_dilated(
            jnp.tile(images, 4)[..., :4], params["kernel"], (1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"), 2
        )
        rows = jnp.einsum("bwc,wcf->bwf", images[:, 0, :5], params["first"])
        return jax.jit(jnp.matmul)(rows.reshape(len(rows), -1), params["second"]) + hidden.mean((1, 2, 3))[:, None], {}


def test_multiply_adds_of_products_and_convolutions_are_those_by_hand():
    register_model("products", lambda config: Products())
    found = summary(Model(name="products", classes=6), (5, 7, 3))
    assert found["macs"] == 5 * 7 * 8 * 9 * 2 + 5 * 3 * 4 + 20 * 6
    assert (found["decayed"], found["not_decayed"]) == ({"tensors": 3, "parameters": 324}, {"tensors": 0, "parameters": 0})


def test_network_that_takes_images_of_one_size_alone_refuses_others():
    register_model("products", lambda config: Products())
    check_image_size(Model(name="unknown"), 8, trained=8, field="x")  # the same size needs no trace
    check_image_size(Model(depth=18, classes=6), 40, trained=8, field="x")
    check_image_size(Model(name="products", classes=6), 9, trained=5, field="x")
    with pytest.raises(ConfigError, match=r"^x=4: .*products cannot take images .* \(5\): .*; omit it"):
        check_image_size(Model(name="products", classes=6), 4, trained=5, field="x")


@pytest.mark.parametrize(
    ("train", "custom_vjp", "form", "products", "has_own_gradients"),
    [
        (True, True, "direct", 1, True),
        (True, False, "direct", 1, False),
        (True, True, "cudnn", 1, True),
        (False, True, "direct", 1, False),  # whose statistics do not depend on the batch
        (False, False, "product", 2, True),  # of products
        (False, False, None, 2, True),  # this host's CPU
    ],
)
def test_program_has_the_form_and_the_gradients_of_its_arguments(train, custom_vjp, form, products, has_own_gradients):
    """The products are the classifier and the 1x1 convolution of a shortcut."""
    net, images = ResNet(TWO_BLOCKS, 5, 4, "small", convolution=form, custom_vjp=custom_vjp), jnp.ones((2, 10, 12, 3))
    variables = jax.eval_shape(lambda: net.init(jax.random.key(0), images, train=False))
    program = str(jax.make_jaxpr(lambda v: net.apply(v, images, train=train, mutable=["batch_stats"]))(variables))
    assert program.count("= dot_general[") == products
    assert ("custom_vjp_call" in program) == has_own_gradients


def test_gradient_in_evaluation_takes_the_statistics_as_constants():
    """Also behind max pooling, as the gradient that JAX derives."""
    images, gradients = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32, 32, 3)), jnp.float32), []
    for custom_vjp in (True, False):
        net = ResNet(TWO_BLOCKS, 5, 8, convolution="cudnn", custom_vjp=custom_vjp)
        variables = net.init(jax.random.key(0), images, train=False)

        def loss(images, net=net, variables=variables):
            return (net.apply(variables, images, train=False) ** 2).sum()

        gradients.append(jax.grad(loss)(images))
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-6 * float(jnp.abs(gradients[1]).max()))


@pytest.mark.parametrize(
    ("stride", "shape", "features", "folds"),
    [
        (1, (1, 3, 4, 12), 13, True),
        (1, (1, 3, 4, 12), 12, False),  # no more features than channels
        (1, (1, 3, 4, 13), 14, False),  # fewer rows than channels
        (2, (2, 4, 6, 12), 13, True),
        (2, (2, 4, 6, 13), 14, False),
        (1, (1, 32, 16, 512), 513, True),
        (1, (1, 32, 17, 513), 514, False),  # too many channels
    ],
)
def test_convolution_folds_from_few_channels_to_more_with_at_least_as_many_rows(stride, shape, features, folds):
    for size, asked in ((1, True), (1, False), (3, True)):
        conv = Conv(features, size, stride, folds=asked)
        found, _ = jax.eval_shape(lambda x, conv=conv: conv.init_with_output(jax.random.key(0), x), jnp.zeros(shape))
        assert isinstance(found, Projection) == (folds and asked and size == 1)


@pytest.mark.parametrize(("platform", "of_jax", "gathers"), [("tpu", "tpu", False), ("gpu", "cuda", True)])
def test_a_tpu_pools_without_gathers(platform, of_jax, gathers):
    """XLA's TPU compiler reads the whole map for each of them."""
    model, params, stats = abstract_params(Model(depth=TWO_BLOCKS, width=8, classes=5), 32, platform)

    def loss(params, stats, images):
        return model.apply(params, stats, images, train=True)[0].sum()

    traced = jax.jit(jax.grad(loss)).trace(params, stats, jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.float32))
    text = traced.lower(lowering_platforms=(of_jax,)).as_text()
    assert ("stablehlo.gather" in text, "stablehlo.select_and_scatter" in text) == (gathers, not gathers)


@pytest.mark.parametrize(
    ("depth", "stem", "size"), [(TWO_BLOCKS, "small", 8), pytest.param(50, "imagenet", 32, marks=pytest.mark.slow)]
)
def test_all_forms_agree_in_logits_moments_and_gradients(monkeypatch, depth, stem, size):
    """To float32 rounding of each tensor, or of the whole gradient for tensors whose gradient nearly cancels.

    8x8 images give the two blocks maps of 4x4, which are products of patches, and a 1x1 convolution.
    """
    monkeypatch.setitem(resnet.BLOCKS, 50, (2, 1, 1, 1))
    images = jnp.asarray(np.random.default_rng(0).normal(size=(8, size, size, 3)), jnp.float32)
    results = []
    for convolution in ("direct", "product", "cudnn", "xla"):
        monkeypatch.setitem(CONVOLUTIONS, "cpu", convolution)
        config = Model(depth=depth, width=8, stem=stem, classes=5)
        model, params, stats = initialize(config)
        params = jax.tree.map(
            lambda p: np.asarray(p) + np.float32(0.1), params
        )  # with zero scales the blocks would have no effect

        def loss(params, model=model, stats=stats):
            logits, moments = model.apply(params, stats, images, train=True)
            return (logits**2).sum(), (logits, moments)

        results.append(jax.jit(jax.grad(loss, has_aux=True))(params))
    direct, *others = results
    whole = float(optax.tree.norm(direct[0]))
    for other in others:
        for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(other), strict=True):
            assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(a) + 1e-6 * whole


def test_init_is_he_with_small_classifier_and_zero_last_scales(monkeypatch):
    monkeypatch.setitem(resnet.BLOCKS, 50, (2, 1, 1))
    _, params, stats = initialize(Model(depth=50, classes=1000))
    kernels = {f"{name}/conv{n}": params[name][f"conv{n}"]["kernel"] for name in ("layer1_0", "layer3_0") for n in (1, 2, 3)}
    for name, kernel in (kernels | {"conv1": params["conv1"]["kernel"]}).items():
        size, _, inputs, outputs = kernel.shape
        assert (inputs == outputs) == (name in ("layer1_0/conv1", "layer1_0/conv2", "layer3_0/conv2"))
        deviation, error = np.sqrt(2 / (size**2 * outputs)), 5 / np.sqrt(kernel.size)
        assert np.asarray(kernel, np.float64).std() == pytest.approx(deviation, rel=error), name
        assert abs(np.asarray(kernel, np.float64).mean()) < error * deviation
    assert np.asarray(params["fc_kernel"]).std() == pytest.approx(0.01, rel=0.01)
    assert not np.any(params["fc_bias"])
    for name, block in params.items():
        if name.startswith("layer"):
            assert not np.any(block["bn3"]["scale"])
            assert np.all(block["bn1"]["scale"] == 1)
            assert np.all(block["bn2"]["scale"] == 1)
    first, second = params["layer1_0"]["conv2"]["kernel"], params["layer1_1"]["conv2"]["kernel"]
    assert not np.array_equal(first, second)  # every tensor has its own random numbers
    assert np.all(stats["bn1"]["var"] == 1)


@pytest.mark.usefixtures("direct_convolutions")
def test_init_of_all_forms_of_a_network_is_traced_once(monkeypatch):
    traces, sample = [], models.sample_params
    monkeypatch.setattr(models, "sample_params", lambda key, stds: traces.append(key) or sample(key, stds))
    config = Model(depth=TWO_BLOCKS, width=8, classes=17)  # of no other test
    for platform in ("any", "cpu", "cpu"):
        jax.eval_shape(lambda: models.create(config, platform).init(jax.random.key(0), (8, 8, 3)))  # noqa: B023
    assert len(traces) == 1


def test_bfloat16_model_convolves_in_bfloat16_and_all_that_it_returns_is_float32():
    config = Model(depth=TWO_BLOCKS, width=4, stem="small", classes=3, dtype="bfloat16")
    model, *trees = abstract_params(config, 8)
    jaxpr, returned = jax.make_jaxpr(lambda *trees: model.apply(*trees, jnp.ones((2, 8, 8, 3)), train=True), return_shape=True)(
        *trees
    )
    kinds = {str(e.invars[0].aval.dtype) for e in jaxpr.jaxpr.eqns if e.primitive.name == "conv_general_dilated"}
    assert kinds == {"bfloat16"}
    assert {leaf.dtype for leaf in jax.tree.leaves((trees, returned))} == {jnp.dtype("float32")}


def test_apply_with_parameters_of_another_network_raises():
    images = jnp.zeros((1, 16, 16, 3))
    stored, other = (ResNet(depth=TWO_BLOCKS, classes=classes, width=4, stem="small") for classes in (5, 9))
    variables = jax.eval_shape(lambda: stored.init(jax.random.key(0), images, train=False))
    with pytest.raises(flax.errors.ScopeParamShapeError, match="fc_kernel"):
        jax.eval_shape(lambda values: other.apply(values, images, train=False), variables)
