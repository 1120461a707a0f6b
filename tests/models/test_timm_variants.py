"""timm's ResNets, plain and of form D, against jaxdp with the same weights."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdp import models
from jaxdp.cli import main
from jaxdp.config import Model
from jaxdp.models import weights
from jaxdp.models.resnet import block_rate
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


def test_drop_path_rates_are_those_of_timm(timm):
    network = timm.create_model("resnet50", drop_path_rate=0.2)
    blocks = [block for name, block in network.named_modules() if name.startswith("layer") and name.count(".") == 1]
    theirs = [getattr(block.drop_path, "drop_prob", 0.0) for block in blocks]
    assert theirs == pytest.approx([block_rate(0.2, number, 16) for number in range(16)])
