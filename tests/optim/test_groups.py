"""Parameter groups: factors on learning rate and weight decay by the paths of parameters, and layer-wise rates."""

import json
import re
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import ConfigError, models
from jaxdp.cli import main
from jaxdp.config import Config, Finetune, Group, Model, Optimizer
from jaxdp.optim.groups import check_groups, listed_parameters
from jaxdp.recipes import apply_flags
from jaxdp.training.state import make_optimizer
from jaxdp.validation import changes, from_dict, to_json, validate

NETWORK = SimpleNamespace(segments=(("body",), ("head",)), trainable=lambda tree, frozen: tree)
GROUPS = (Group("head", rate=10.0), Group("bias", decay=0.0), Group("scale", decay=2.0), Group("body", rate=0.5))
# path -> (rate, decay), worked out by hand: the first group that matches; biases and scales do not decay by default
EXPECTED = {
    ("body", "kernel"): (0.5, 1),
    ("body", "bias"): (1, 0),
    ("body", "scale"): (1, 2),
    ("head", "kernel"): (10, 1),
    ("head", "bias"): (10, 0),
}


def parameters(random):
    shapes = {path: (3, 4) if path[1] == "kernel" else (4,) for path in EXPECTED}
    return {path: random.normal(size=shape) for path, shape in shapes.items()}


def nested(tensors):
    trees = {"body": {}, "head": {}}
    for (part, name), tensor in tensors.items():
        trees[part][name] = jnp.asarray(tensor, jnp.float32)
    return trees


def torch_sgd(state, weight, gradient, *, rate, decay, step):
    """torch.optim.SGD(lr=rate, momentum=0.9, weight_decay=decay), by its documentation."""
    gradient = gradient + decay * weight
    buffer = 0.9 * state["buffer"] + gradient if step else gradient
    return {"buffer": buffer}, weight - rate * buffer


def torch_adamw(state, weight, gradient, *, rate, decay, step):
    """torch.optim.AdamW(lr=rate, betas=(0.9, 0.999), weight_decay=decay), by its documentation."""
    weight = weight - rate * decay * weight
    mean = 0.9 * state.get("mean", 0) + 0.1 * gradient
    square = 0.999 * state.get("square", 0) + 0.001 * gradient**2
    corrected = mean / (1 - 0.9 ** (step + 1)), square / (1 - 0.999 ** (step + 1))
    return {"mean": mean, "square": square}, weight - rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)


@pytest.mark.parametrize(("name", "reference"), [("sgd", torch_sgd), ("adamw", torch_adamw)])
def test_twenty_steps_equal_those_of_torch_with_the_same_groups(name, reference):
    """In float64, a torch parameter group with its own lr and weight_decay for each parameter."""
    random = np.random.default_rng(1)
    config = Config(optimizer=Optimizer(name=name, weight_decay=0.1, groups=GROUPS))
    weights, states = parameters(random), {path: {} for path in EXPECTED}
    ours, rule = nested(weights), make_optimizer(config, NETWORK, learning_rate=0.01, momentum=0.9)
    state, update = rule.init(ours), jax.jit(rule.update)
    for step in range(20):
        gradients = parameters(random)
        for path, (rate, decay) in EXPECTED.items():
            factors = {"rate": 0.01 * rate, "decay": 0.1 * decay, "step": step}
            states[path], weights[path] = reference(states[path], weights[path], gradients[path], **factors)
        updates, state = update(nested(gradients), state, ours)
        ours = optax.apply_updates(ours, updates)
    for (part, leaf), expected in weights.items():
        np.testing.assert_allclose(ours[part][leaf], expected, rtol=2e-5, atol=2e-6, err_msg=f"{part}/{leaf}")


def first_update(optimizer, params, **finetune):
    config = Config(optimizer=optimizer, finetune=Finetune(**finetune))
    rule = make_optimizer(config, NETWORK, learning_rate=0.1, momentum=0.9)
    return rule.update(jax.tree.map(lambda p: p - 0.1, params), rule.init(params), params)[0]


@pytest.mark.parametrize("name", ["lars", "lamb", "mine"])
def test_the_rate_factor_multiplies_the_update_of_its_group_alone(name):
    jaxdp.register_optimizer("mine", lambda config, rate, momentum: optax.lion(rate, b1=momentum))
    params = nested(parameters(np.random.default_rng(2)))
    plain = first_update(Optimizer(name=name), params)
    scaled = first_update(Optimizer(name=name, groups=(Group("head/k", rate=3.0),)), params, layer_decay=0.5)
    factors = {"body": {"kernel": 0.5, "bias": 0.5, "scale": 0.5}, "head": {"kernel": 3.0, "bias": 1.0}}
    jax.tree.map(lambda ours, f, u: np.testing.assert_allclose(ours, f * u, rtol=1e-6), scaled, factors, plain)


@pytest.mark.parametrize("name", ["lars", "lamb", "mine"])
def test_the_decay_factor_equals_a_weight_decay_of_its_group_alone(name):
    """The trust ratios of LARS and LAMB follow."""
    jaxdp.register_optimizer(
        "mine", lambda config, rate, momentum: optax.adamw(rate, b1=momentum, weight_decay=config.weight_decay)
    )
    params = nested(parameters(np.random.default_rng(3)))
    grouped = first_update(Optimizer(name=name, weight_decay=0.1, groups=(Group("head/k", decay=4.0),)), params)
    for path, decay in (("body", 0.1), ("head", 0.4)):
        expected = first_update(Optimizer(name=name, weight_decay=decay), params)[path]["kernel"]
        np.testing.assert_allclose(grouped[path]["kernel"], expected, rtol=1e-6)


def listed(config):
    model = models.create(config.model)
    return listed_parameters(config, model, models.initial_shapes(model, (32, 32, 3))[0])


def timm_layer(name):
    """The ordinal of a layer by the `group_matcher` of timm's ResNets, of names as layer1.0.conv1.weight; the rest is last."""
    if re.match(r"conv1|bn1|maxpool", name):
        return (0.0, -1.0, -1.0)
    block = re.match(r"layer(\d+)\.(\d+)", name)
    return (1.0, float(block[1]), float(block[2])) if block else (np.inf, 0.0, 0.0)


def test_layer_decay_of_a_resnet_50_equals_that_of_timm():
    """decay^(last layer - layer): the stem, 16 blocks, the classifier."""
    config = Config(model=Model(depth=50, classes=7), finetune=Finetune(layer_decay=0.75))
    rows = listed(config)
    layers = {row["path"]: timm_layer(row["path"].replace("/", ".").replace("_", ".", 1)) for row in rows}
    order = sorted(set(layers.values()))
    assert len(order) == 18
    for row in rows:
        assert row["rate"] == pytest.approx(0.75 ** (17 - order.index(layers[row["path"]])), rel=1e-12), row["path"]
        assert row["decay"] == (len(row["shape"]) > 1)


class VisionTransformer(nn.Module):
    """Patches, 3 blocks of attention, a head, in the order of `stages`."""

    classes: int

    def setup(self):
        self.patch_embed = nn.Conv(8, (4, 4), (4, 4))
        self.blocks = [nn.MultiHeadDotProductAttention(2) for _ in range(3)]
        self.head = Pooled(self.classes)

    def __call__(self, x):
        for stage in self.stages():
            x = stage(x)
        return x

    def stages(self):
        return [self.patch_embed, *self.blocks, self.head]


class Pooled(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes, name="fc")(x.mean((1, 2)))


def test_layer_decay_of_a_vision_transformer_equals_that_of_timm_and_multiplies_groups():
    """timm: patch_embed is layer 0, block i is layer i + 1, the head is the last one."""
    jaxdp.register_model("vit", VisionTransformer)
    optimizer = Optimizer(groups=(Group("query", rate=2.0),))
    config = Config(model=Model(name="vit", classes=7), finetune=Finetune(layer_decay=0.6), optimizer=optimizer)
    rows = listed(config)
    assert len(rows) == 2 + 3 * 8 + 2
    for row in rows:
        block = re.search(r"blocks_(\d)", row["path"])
        layer = 0 if "patch_embed" in row["path"] else int(block[1]) + 1 if block else 4
        expected = 0.6 ** (4 - layer) * (2 if "query" in row["path"] else 1)
        assert row["rate"] == pytest.approx(expected, rel=1e-12), row["path"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("body/kernl:rate=2", r"='body/kernl:rate=2': it matches no trained parameter; the nearest paths are body/kernel, "),
        ("head:rate=2 kernel:rate=3 d/k:rate=1", "='d/k:rate=1': all parameters that it matches are in groups before it"),
        ("(:rate=2", r"'\(' is no regular expression"),
        ("fc", "'fc': must be PATTERN:rate=FACTOR,decay=FACTOR"),
        ("fc:rate=2,lr=3", "must be PATTERN"),
        ("fc:rate=2,rate=3", "must be PATTERN"),
        ("kernel:rate=3 kernel:rate=3", "='kernel:rate=3': all parameters that it matches are in groups before it"),
        ("fc:rate=-1", r"optimizer.groups.0.rate=-1.0: must be"),
    ],
)
def test_a_wrong_group_is_refused_in_one_line(groups, message):
    def check(*flags):
        config = validate(apply_flags(Config(), ["--optimizer.groups", *flags]))
        check_groups(config, NETWORK, nested(parameters(np.random.default_rng(0))))

    with pytest.raises(ConfigError, match=message) as error:
        check(*groups.split())
    assert "\n" not in str(error.value)


def test_layer_decay_of_a_model_without_stages_is_refused(normalized_linear):
    config = Config(model=Model(name="normalized_linear", classes=7), finetune=Finetune(layer_decay=0.5))
    with pytest.raises(ConfigError, match=r"finetune.layer_decay=0.5: 'normalized_linear' has no layers; give .* stages"):
        check_groups(config, models.create(config.model), {})


def test_groups_of_flags_replace_those_of_a_recipe_and_survive_json():
    recipe = Config(optimizer=Optimizer(groups=(Group("fc", rate=10.0),)))
    config = validate(apply_flags(recipe, ["--optimizer.groups", "a:b:rate=2", "bias|scale:decay=0,rate=3"]))
    assert config.optimizer.groups == (Group("a:b", rate=2.0), Group("bias|scale", rate=3.0, decay=0.0))
    assert from_dict(json.loads(to_json(config))) == config
    assert changes(recipe, config) == ["optimizer.groups: ('fc:rate=10') -> ('a:b:rate=2', 'bias|scale:rate=3,decay=0')"]
    assert apply_flags(recipe, ["--optimizer.groups"]).optimizer.groups == ()
    assert apply_flags(recipe, []) == recipe


def test_the_removed_multiplier_names_the_groups():
    old = json.loads(to_json(Config()))
    old["finetune"]["head_multiplier"] = 10.0
    with pytest.raises(
        ConfigError, match=r"finetune.head_multiplier: removed; remove it; .* the group fc:rate=RATE to optimizer.groups"
    ):
        from_dict(old)
    with pytest.raises(ConfigError, match=r"did you mean --optimizer.groups fc:rate=10\?"):
        apply_flags(Config(), ["--finetune.head-multiplier", "10"])


def test_plan_lists_every_parameter_with_its_factors(capsys):
    flags = ["--model.depth", "18", "--finetune.layer-decay", "0.5"]
    main.main(
        ["plan", "--json", "--parameters", "--devices", "1", *flags, "--optimizer.groups", "fc:rate=4", "bn2/bias:decay=1"]
    )
    printed = json.loads(capsys.readouterr().out)
    rows = {row["path"]: row for row in printed["parameters"]}
    assert len(rows) == 62  # of torchvision's resnet18
    assert rows["fc_kernel"] == {"path": "fc_kernel", "shape": [512, 10], "group": "fc", "rate": 4.0, "decay": 1.0}
    assert rows["layer4_0/bn2/bias"] == {
        "path": "layer4_0/bn2/bias", "shape": [512], "group": "bn2/bias", "rate": 0.25, "decay": 1.0
    }  # fmt: skip
    decayed = [np.prod(row["shape"]) for row in rows.values() if row["decay"]]
    assert printed["model"]["decayed"] == {"tensors": len(decayed), "parameters": sum(decayed)}
