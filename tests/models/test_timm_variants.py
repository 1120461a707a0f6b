"""timm's ResNets, plain and of form D, against jaxdp with the same weights."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdp import models
from jaxdp.cli import main
from jaxdp.config import Model
from jaxdp.models import weights
from jaxdp.models.resnet import block_rate, branch_factor
from jaxdp.models.torch_weights import to_torch

pytestmark = pytest.mark.slow
NETWORKS = {f"resnet{depth}": {"depth": depth} for depth in (18, 34, 50, 101, 152)}
NETWORKS |= {
    "resnet18d": {"depth": 18, "stem": "deep", "shortcut": "pooled"},
    "resnet50c": {"depth": 50, "stem": "deep"},
    "resnet50d": {"depth": 50, "stem": "deep", "shortcut": "pooled"},
}


@pytest.fixture(scope="module")
def timm():
    pytest.importorskip("torch")
    return pytest.importorskip("timm")


def random_network(timm, name):
    """timm's network with random weights and statistics, none of them 0 or 1."""
    import torch

    torch.manual_seed(0)
    network = timm.create_model(name).eval()
    with torch.no_grad():
        for key, value in network.state_dict().items():
            if key.endswith("running_var"):
                value.uniform_(0.5, 2)
            elif value.ndim == 1:
                value.normal_(0.5 if key.endswith("weight") else 0.0, 0.2)
    return network


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_of_timm_score_equal_and_go_back_unchanged(timm, name, tmp_path):
    import torch

    network = random_network(timm, name)
    state = {key: value.numpy() for key, value in network.state_dict().items()}
    theirs, ours = tmp_path / "model.safetensors", tmp_path / "ours.safetensors"
    save_file(state, theirs)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))  # as on the Hugging Face hub
    main.main(["import", str(theirs), "--output", str(ours)])
    read = weights.read(ours)
    assert read.model == Model(classes=1000, **NETWORKS[name])

    images = np.random.default_rng(0).normal(size=(2, 96, 70, 3)).astype(np.float32)  # odd sides, too
    model = models.create(read.model)
    logits = jax.jit(lambda *given: model.apply(*given, train=False)[0])(read.params, read.batch_stats, images)
    with torch.no_grad():
        expected = network(torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))).numpy()
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)

    exported = to_torch(weights.named_tensors(read.params, read.batch_stats), steps=0)
    assert exported.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(exported[key], value)
    assert load_file(ours).keys() == weights.named_tensors(read.params, read.batch_stats).keys()


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize(
    "variant",
    [
        {"blur_pool": "convolutions"},
        {"blur_pool": "convolutions_and_pool"},
        {"drop_path": 0.5},
        {"drop_path": 0.5, "blur_pool": "convolutions"},
        {"drop_path": 0.5, "batch_norm": "folded"},
        {"stem": "deep", "shortcut": "pooled"},
        {"stem": "deep", "shortcut": "pooled", "batch_norm": "folded"},
    ],
    ids=lambda variant: ", ".join(map(str, variant.values())),
)
def test_gradient_equals_torch_in_float64(timm, two_blocks, tmp_path, variant, depth):
    """Against timm's network, with FFCV's and Composer's layers restated in torch.

    Of one of four batches: where a sum is zero up to rounding, the ReLU or the maximum of float32 may differ.
    """
    import torch

    key = jax.random.key(5)
    factor = branch_factor(jax.random.split(key, 8), variant.get("drop_path", 0.0), 1)
    assert len(np.unique(factor)) == 1 + ("drop_path" in variant)
    network = torch_network(timm, depth, variant, np.asarray(factor))
    tensors = {name.replace(".conv.", "."): value.float().numpy() for name, value in network.state_dict().items()}
    save_file(tensors, tmp_path / "w.safetensors")
    read = weights.read(tmp_path / "w.safetensors", blur_pool=variant.get("blur_pool", "none"))
    model = models.create(dataclasses.replace(read.model, **variant))

    @jax.jit
    @jax.grad
    def gradient(params, images):
        return jnp.sin(model.apply(params, read.batch_stats, images, train=True, key=key)[0]).sum()

    def largest_error(seed):
        images = np.random.default_rng(seed).normal(size=(8, 20, 20, 3))
        network.zero_grad()
        torch.sin(network(torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))))).sum().backward()
        wanted = {name.replace(".conv.", "."): value.grad.numpy() for name, value in network.named_parameters()}
        found = jax.device_get(gradient(read.params, images.astype(np.float32)))
        found = to_torch(weights.named_tensors(found, {}), steps=0)
        assert found.keys() == wanted.keys()
        return max(np.linalg.norm(found[name] - wanted[name]) / np.linalg.norm(wanted[name]) for name in wanted)

    errors = list(map(largest_error, range(4)))
    assert min(errors) <= 3e-5


def torch_network(timm, depth, variant, factor):
    """timm's ResNet of two blocks in training, float64. factor: of drop-path on the second block's branch, for each image."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Blur(nn.Module):
        def __init__(self, channels, stride):
            super().__init__()
            self.stride, self.groups = stride, channels
            taps = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
            self.register_buffer("filter", (torch.outer(taps, taps) / 16).repeat(channels, 1, 1, 1), persistent=False)

        def forward(self, x):
            return functional.conv2d(x, self.filter, stride=self.stride, padding=1, groups=self.groups)

    class BlurredConv(nn.Module):
        def __init__(self, conv):
            super().__init__()
            self.blur, self.conv = Blur(conv.in_channels, 1), conv

        def forward(self, x):
            return self.conv(self.blur(x))

    class Factor(nn.Module):
        def forward(self, x):
            return x * torch.from_numpy(factor.astype(np.float64).transpose(0, 3, 1, 2))

    torch.manual_seed(0)
    layers, form = timm.models.resnet, variant.get("blur_pool")
    options = {}
    options |= {"stem_width": 32, "stem_type": "deep", "avg_down": True} if "stem" in variant else {}
    block = layers.Bottleneck if depth == 50 else layers.BasicBlock
    network = layers.ResNet(block, (1, 1), channels=(64, 128), num_classes=6, **options).double()
    network.layer3 = network.layer4 = nn.Identity()
    with torch.no_grad():
        for name, value in network.named_parameters():
            if value.ndim == 1:
                value.normal_(0.7 if name.endswith("weight") else 0.0, 0.2)
            value.copy_(value.float())  # what jaxdp reads
    if form in ("convolutions", "convolutions_and_pool"):
        first, last = network.layer2[0], "conv2" if depth == 50 else "conv1"
        setattr(first, last, BlurredConv(getattr(first, last)))
        first.downsample[0] = BlurredConv(first.downsample[0])
        if form == "convolutions_and_pool":
            network.maxpool = nn.Sequential(nn.MaxPool2d(3, 1, 1), Blur(64, 2))
    if "drop_path" in variant:
        network.layer2[0].drop_path = Factor()
    return network


def test_drop_path_rates_are_those_of_timm(timm):
    network = timm.create_model("resnet50", drop_path_rate=0.2)
    blocks = [block for name, block in network.named_modules() if name.startswith("layer") and name.count(".") == 1]
    theirs = [getattr(block.drop_path, "drop_prob", 0.0) for block in blocks]
    assert theirs == pytest.approx([block_rate(0.2, number, 16) for number in range(16)])
