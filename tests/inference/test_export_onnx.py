"""Files of `jaxdp export --format onnx` in ONNX Runtime, and both formats against torchvision."""

import dataclasses
import itertools
import json

import jax
import jax.export
import numpy as np
import pytest
from helpers import torch_layout
from helpers.served import BATCHES, PREPARATIONS, assert_close, random_images, save_random_run, softmax
from safetensors.numpy import load_file

from jaxdp.cli import main
from jaxdp.config import Model
from jaxdp.data.datasets import pixel_stats
from jaxdp.inference.export import export
from jaxdp.models import resnet

pytestmark = pytest.mark.slow
onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
VARIANTS = {
    "small stem": {"stem": "small"},
    "plain": {},
    "convolutions": {"blur_pool": "convolutions"},
    "convolutions_and_pool": {"blur_pool": "convolutions_and_pool"},
    "form D": {"stem": "deep", "shortcut": "pooled"},
}


def session_of(file):
    onnx.checker.check_model(str(file), full_check=True)
    return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def exported(config, tmp_path):
    """(session of the exported file, function: images -> logits of evaluation) of a run with random weights."""
    logits = save_random_run(config, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "m.onnx", format="onnx")
    return session_of(tmp_path / "m.onnx"), logits


@pytest.mark.parametrize(("variant", "depth"), [*zip(VARIANTS, itertools.cycle([18, 50])), ("form D", 18)])
def test_logits_of_every_variant_equal_evaluation_and_numpy(tiny_resnet, tmp_path, monkeypatch, variant, depth):
    monkeypatch.setitem(resnet.BLOCKS, 50, (1, 1))
    data = dataclasses.replace(tiny_resnet.data, image_size=33)
    model = Model(depth=depth, width=16, classes=6, dtype="bfloat16", **VARIANTS[variant])
    session, logits = exported(dataclasses.replace(tiny_resnet, data=data, model=model), tmp_path)
    export(tmp_path / "run", tmp_path / "w.safetensors", format="timm")
    tensors, small = load_file(tmp_path / "w.safetensors"), model.stem == "small"
    images = random_images(max(BATCHES), 33)
    of_evaluation = np.asarray(logits(images))
    normalized = ((images / 255 - 0.5) / (52 / 255)).transpose(0, 3, 1, 2)
    of_numpy = torch_layout.logits(tensors, normalized, small_stem=small, blur_pool=model.blur_pool)
    for count in BATCHES:
        probabilities, found = session.run(["probabilities", "logits"], {"images": images[:count]})
        assert_close(found, of_evaluation[:count])
        assert_close(found, of_numpy[:count])
        np.testing.assert_allclose(probabilities, softmax(of_numpy[:count]), atol=1e-6)


@pytest.mark.parametrize("name", sorted(PREPARATIONS.keys() - {"plain"}))
def test_preprocessing_on_the_device_is_included(tiny_resnet, tmp_path, name):
    data, side = PREPARATIONS[name]
    session, logits = exported(dataclasses.replace(tiny_resnet, data=data), tmp_path)
    images = random_images(3, side)
    assert_close(session.run(["logits"], {"images": images})[0], logits(images))


def test_metadata_inputs_and_outputs_are_those_of_the_documentation(tiny_resnet, tmp_path, capsys):
    save_random_run(tiny_resnet, tmp_path / "run")
    file = tmp_path / "m.onnx"
    main.main(["export", "--workdir", str(tmp_path / "run"), "--format", "onnx", "--output", str(file), "--json"])
    metadata = json.loads(capsys.readouterr().out)["metadata"]
    session = session_of(file)
    texts = session.get_modelmeta().custom_metadata_map
    assert texts.keys() == metadata.keys()
    for name, value in metadata.items():
        assert texts[name] == value if isinstance(value, str) else json.loads(texts[name]) == value
    values = [(value.name, value.shape, value.type) for value in (*session.get_inputs(), *session.get_outputs())]
    assert values == [
        ("images", ["N", 16, 16, 3], "tensor(uint8)"),
        ("probabilities", ["N", 6], "tensor(float)"),
        ("logits", ["N", 6], "tensor(float)"),
    ]
    first = file.read_bytes()
    export(tmp_path / "run", file, format="onnx", overwrite=True)
    assert file.read_bytes() == first


@pytest.mark.parametrize("depth", [18, 50])
def test_both_formats_equal_torchvision_with_the_exported_weights(tiny_resnet, tmp_path, monkeypatch, depth):
    torch = pytest.importorskip("torch", reason="needs the extra peers")
    torchvision = pytest.importorskip("torchvision", reason="needs the extra peers")
    for name, blocks in {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}.items():
        monkeypatch.setitem(resnet.BLOCKS, name, blocks)
    data = dataclasses.replace(tiny_resnet.data, image_size=64)
    config = dataclasses.replace(tiny_resnet, data=data, model=Model(depth=depth, classes=1000))
    session, _ = exported(config, tmp_path)
    for format, suffix in (("torchvision", ".safetensors"), ("stablehlo", ".jaxexport")):
        export(tmp_path / "run", tmp_path / f"m{suffix}", format=format)
    state = {name: torch.from_numpy(value) for name, value in load_file(tmp_path / "m.safetensors").items()}
    network = getattr(torchvision.models, f"resnet{depth}")().eval()
    network.load_state_dict(state, strict=True)
    images = random_images(3, 64)
    mean, std = pixel_stats(config)
    with torch.no_grad():
        expected = network(((torch.from_numpy(images).float() - mean) / std).permute(0, 3, 1, 2)).numpy()
    assert_close(session.run(["logits"], {"images": images})[0], expected)
    call = jax.export.deserialize((tmp_path / "m.jaxexport").read_bytes()).call
    assert_close(jax.jit(call)(images)["logits"], expected)
