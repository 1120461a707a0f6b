"""Weight files in torchvision's naming, compared with an independent implementation of that layout."""

import argparse
import gzip
import hashlib
import io
import json
import pickle
import re
import tarfile
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import torch_layout
from helpers.saved_run import STEPS, save_run
from safetensors.flax import save_file as flax_save_file
from safetensors.numpy import load_file, save_file

from jaxdp import ConfigError, models
from jaxdp.cli import main
from jaxdp.config import Model
from jaxdp.inference.export import export
from jaxdp.inference.load_run import load_run
from jaxdp.models import preprocessing, weights
from jaxdp.models.torch_weights import to_torch_layout, torch_name

pytestmark = pytest.mark.usefixtures("two_blocks")
SIZES = {"width": 4, "classes": 6}
BASIC = ((1, 1), False)
UNSTATED = "the file does not name its BlurPool; assumed: none"


def write(path, tensors, **changes):
    """Write a file of these tensors with some replaced (None: omitted); its path."""
    save_file({name: value for name, value in (tensors | changes).items() if value is not None}, path)
    return path


def test_export_to_torchvision_and_import_preserves_logits_and_bits(tiny_resnet, tmp_path, capsys):
    random = write(tmp_path / "w.safetensors", torch_layout.random_tensors(1, *BASIC, **SIZES, stem=3))
    tensors = weights.read(random)
    save_run(tiny_resnet, tmp_path / "run", tensors.params, tensors.batch_stats)
    file = tmp_path / "out" / "w.safetensors"
    exported = export(tmp_path / "run", file, format="torchvision")
    assert (exported["format"], len(exported["warnings"])) == ("torchvision", 2)
    assert "pixels in [0, 1] normalized with mean 0.5 and standard deviation 0.2039" in exported["warnings"][1]
    tensors = load_file(file)
    steps = {name: tensors.pop(name) for name in list(tensors) if name.endswith("num_batches_tracked")}
    assert {int(value) for value in steps.values()} == {STEPS}
    assert {name: value.shape for name, value in tensors.items()} == torch_layout.tensor_shapes(*BASIC, **SIZES, stem=3)
    params, batch_stats = load_run(tmp_path / "run")[0].eval_variables
    images = np.random.default_rng(0).normal(size=(3, 16, 16, 3)).astype(np.float32)
    model = models.create(tiny_resnet.model)
    ours = jax.jit(lambda: model.apply(params, batch_stats, images, train=False)[0])()
    expected = torch_layout.logits(tensors, images.transpose(0, 3, 1, 2), small_stem=True)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)

    back = tmp_path / "back.safetensors"
    main.main(["import", str(file), "--output", str(back), "--json"])
    expected = {"depth": 18, "width": 4, "stem": "small", "shortcut": "strided", "classes": 6}
    expected |= {"blur_pool": "none"}
    assert json.loads(capsys.readouterr().out)["model"] == expected
    export(tmp_path / "run", tmp_path / "own.safetensors")
    own, imported = load_file(tmp_path / "own.safetensors"), load_file(back)
    assert own.keys() == imported.keys()
    for name, value in own.items():
        np.testing.assert_array_equal(imported[name], value)
    assert weights.read(back).naming == "jaxdp"
    export(tmp_path / "run", file, format="timm", overwrite=True)
    assert load_file(file).keys() == tensors.keys() | steps.keys()


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({}, ["--stem", "small"], "--stem='small': .* has stem 'imagenet'"),
        ({"fc.bias": None}, [], "no classifier bias"),
        ({"layer2.0.bn1.weight": None}, [], "1 missing tensor 'layer2.0.bn1.weight'"),
        (
            {"layer2.0.bn1.weight": None, "layer2.0.bn2.bias": None},
            [],
            "2 missing tensors, 'layer2.0.bn1.weight' first, for a ResNet-18; give a complete file",
        ),
        ({"n_averaged": np.array(3)}, [], "1 unexpected tensor 'n_averaged', .*; give a file of the network alone"),
        ({"layer3.0.conv1.weight": np.zeros(2, np.float32)}, [], r"stages of \(1, 1, 1\) basic blocks match no ResNet"),
        ({"bn1.bias": np.zeros(5, np.float32)}, [], r"bn1.bias has shape \(5,\), expected \(4,\)"),
        ({"conv1.weight": np.zeros((4, 3, 5, 5), np.float32)}, [], "unknown stem"),
        ({"conv1.weight": None}, [], "the file has tensors such as 'bn1.bias'"),
        ({"bn1.bias": np.full(4, np.nan, np.float32)}, [], "bn1.bias has values that are not finite"),
        ({"bn1.bias": np.zeros(4, np.int32)}, [], "bn1.bias has dtype I32"),
        ({"bn1.running_var": np.full(4, -1e-3, np.float32)}, [], "bn1.running_var has a negative variance"),
    ],
)
def test_import_of_unusable_file_prints_one_line_and_writes_nothing(tmp_path, capsys, change, flags, message):
    file = write(tmp_path / "w.safetensors", torch_layout.random_tensors(0, *BASIC, **SIZES), **change)
    with pytest.raises(SystemExit, match="2"):
        main.main(["import", str(file), "--output", str(tmp_path / "out.safetensors"), *flags])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def zipped(name: str) -> bytes:
    tensors = io.BytesIO()
    with zipfile.ZipFile(tensors, "w") as archive:
        archive.writestr(name, b"a pickle")
    return tensors.getvalue()


def tarred(name: str) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    return archive.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 102469840\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.safetensors", None, "file not found"),
        ("text.safetensors", b"no tensors at all", "not a safetensors file"),
        ("empty.safetensors", b"", "not a safetensors file: it is empty"),
        ("lfs.safetensors", LFS, "it is a Git LFS pointer, in place of the file; run `git lfs pull`"),
        ("page.safetensors", b"\n<!DOCTYPE html>\n<html>", "it is an HTML page; download the file itself"),
        ("page.safetensors", b'<?xml version="1.0"?>\n<html>', "it is an HTML page"),
        (
            "error.safetensors",
            b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code>',
            "it is an XML text, such as an error of obj",
        ),
        (
            "model.safetensors.index.json",
            b'{"metadata": {}, "weight_map": {}}',
            "it is the index of weights in several files; join",
        ),
        ("config.json", b'{"architecture": "resnet50"}', "it is a JSON text; give weights as a .safetensors"),
        ("w.gz", gzip.compress(b"weights", mtime=0), "it is a compressed file; unpack it"),
        ("w.zip", zipped("w.safetensors"), "it is a zip archive; unpack it"),
        ("w.tar", tarred("w.safetensors"), "it is a tar archive; unpack it"),
        ("w.npy", b"\x93NUMPY\x01\x00", "it is a NumPy file"),
        ("w.h5", b"\x89HDF\r\n\x1a\n", "it is an HDF5 file, as of Keras"),
        ("model-00001-of-00003.safetensors", b"", "it is one of 3 files: .*; join the files"),
        ("renamed.safetensors", zipped("archive/data.pkl"), "the file is a pickle"),
        *((f"{protocol}.pkl", pickle.dumps([1], protocol), "the file is a pickle") for protocol in range(2, 6)),
        *(("no.pkl", data, r"not a safetensors file \(") for data in (b"\x80\x01].", b"a\x02].", b"\x80\x06].")),
    ],
)
def test_read_of_another_format_is_rejected(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        weights.read(tmp_path / name)


@pytest.mark.parametrize("bottleneck", [False, True])
def test_the_networks_that_share_the_names_of_a_resnet_are_named(tmp_path, bottleneck, monkeypatch):
    """With the shapes of torchvision's resnext50_32x4d, resnext101_64x4d, wide_resnet50_2, and of narrower ones."""
    network, depth = ((1, 1), bottleneck), 50 if bottleneck else 18
    monkeypatch.setitem(weights.BLOCKS, depth, (1, 1))
    tensors = torch_layout.random_tensors(0, *network, classes=6)
    for inner, of_group, name in ((128, 4, "32x4d"), (256, 4, "64x4d"), (128, 128, "2 times as wide"), (64, 1, "64x1d")):
        first = tensors["layer1.0.conv1.weight"].shape[1:]
        changed = {"layer1.0.conv1.weight": np.zeros((inner, *first), np.float32)}
        changed |= {"layer1.0.conv2.weight": np.zeros((inner, of_group, 3, 3), np.float32)}
        family = "wide ResNet" if "wide" in name else "ResNeXt"
        with pytest.raises(ConfigError, match=rf"a {family}-{depth} \({name}\) is not supported; give weights of a ResNet-"):
            weights.read(write(tmp_path / "w.safetensors", tensors, **changed))
    squeezed = {"layer1.0.se.fc1.weight": np.zeros((8, 64, 1, 1), np.float32)}
    with pytest.raises(ConfigError, match=rf"a ResNet-{depth} with squeeze-and-excitation is not supported; give weights"):
        weights.read(write(tmp_path / "w.safetensors", tensors, **squeezed))


@pytest.mark.parametrize(
    ("fields", "params", "naming", "notes", "words"),
    [
        ({}, ["fc_bias"], "jaxdp", (), "ResNet-18, 6 classes, with jaxdp's names"),
        ({"width": 63}, ["fc_bias"], "torchvision", (), "ResNet-18, width 63, 6 classes, with torchvision's and timm's names"),
        ({"stem": "small", "width": 65}, [], "jaxdp", ("a", "b"), "ResNet-18, width 65, small stem, with jaxdp's names, a, b"),
    ],
    ids=str,
)
def test_weights_describe_network_names_and_conversions(fields, params, naming, notes, words):
    model = Model(depth=18, classes=6, **fields)
    assert weights.Weights("w", model, dict.fromkeys(params), {}, naming, "", notes).describe() == words


@pytest.mark.parametrize(
    ("count", "words"), [(1, "'a'"), (10, "'i', 'j'"), (11, "'i', 'j' and 1 more"), (13, "'j' and 3 more")]
)
def test_first_ten_names_are_listed(count, words):
    listed = weights.listed(reversed("abcdefghijklm"[:count]))
    assert listed.startswith("'a'")
    assert listed.endswith(words)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits_are_read_exactly_and_a_variance_may_be_zero(tmp_path, dtype):
    tensors = {name: jnp.asarray(value, dtype) for name, value in torch_layout.random_tensors(1, *BASIC, **SIZES).items()}
    tensors["bn1.running_var"] = jnp.zeros(4, dtype)
    flax_save_file(tensors, tmp_path / "w.safetensors")
    read = weights.read(tmp_path / "w.safetensors")
    for name, value in weights.named_tensors(read.params, read.batch_stats).items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(to_torch_layout(value), np.asarray(tensors[torch_name(name)], np.float32))
    assert read.notes == (UNSTATED,)


def test_digest_is_of_sorted_names_shapes_and_values():
    """By its definition, 16 digits of SHA-256."""
    one, other = np.arange(6, dtype=np.float32), np.ones((2, 1), np.float32)
    text = b"a (2, 1)\0" + other.tobytes() + b"b (6,)\0" + one.tobytes()
    assert weights.digest_of({"b": one, "a": other}) == hashlib.sha256(text).hexdigest()[:16]


def test_digest_depends_on_weights_only(tmp_path):
    tensors = torch_layout.random_tensors(1, *BASIC, **SIZES)
    file = write(tmp_path / "w.safetensors", tensors)
    main.main(["import", str(file), "--output", str(tmp_path / "ours.safetensors")])
    with pytest.raises(ConfigError, match=r"ours\.safetensors"):
        weights.import_file(file, tmp_path / "ours.safetensors")  # which exists
    save_file(dict(reversed(tensors.items())), tmp_path / "copy.safetensors", {"epoch": "3", "source": "elsewhere"})
    digest = weights.read(file).digest
    assert weights.read(tmp_path / "ours.safetensors").digest == weights.read(tmp_path / "copy.safetensors").digest == digest
    metadata = preprocessing.metadata_of((tmp_path / "ours.safetensors").read_bytes())
    assert (metadata.pop("source"), metadata.pop("source_digest"), [*metadata]) == ("w.safetensors", digest, ["model"])
    name = "layer2.0.bn2.running_mean"
    assert weights.read(write(tmp_path / "other.safetensors", tensors | {name: tensors[name] + 1e-6})).digest != digest
    doubles = {name: value.astype(np.float64) + 1e-9 for name, value in tensors.items()}
    read = weights.read(write(tmp_path / "doubles.safetensors", doubles))
    np.testing.assert_array_equal(read.params["fc_bias"], doubles["fc.bias"].astype(np.float32))
    assert read.notes == ("rounded from float64 to float32", UNSTATED)


@pytest.mark.parametrize(
    ("prefix", "foreign", "notes"),
    [
        ("_orig_mod.", {}, ()),
        ("module.", {"n_averaged": np.array(3)}, ("1 tensor without it left out: 'n_averaged'",)),  # PyTorch's AveragedModel
        (
            "model.module.",
            {"val_acc.tp": np.zeros(6), "criterion.weight": np.ones(6, np.float16)},
            ("2 tensors without it left out: 'criterion.weight', 'val_acc.tp'",),
        ),
    ],
)
def test_prefix_of_a_wrapper_and_tensors_beside_the_network_are_left_out_and_named(tmp_path, capsys, prefix, foreign, notes):
    tensors = torch_layout.random_tensors(1, *BASIC, **SIZES)
    file = write(tmp_path / "w.safetensors", {prefix + name: value for name, value in tensors.items()} | foreign)
    read = weights.read(file)
    assert read.digest == weights.read(write(tmp_path / "alone.safetensors", tensors)).digest
    assert read.notes == (f"prefix {prefix!r} removed", *notes, UNSTATED)
    main.main(["import", str(file), "--output", str(tmp_path / "out.safetensors")])
    assert f", prefix {prefix!r} removed, " in capsys.readouterr().out


def test_two_networks_in_a_file_are_refused(tmp_path):
    tensors = torch_layout.random_tensors(1, *BASIC, **SIZES)
    both = {prefix + name: value for prefix in ("model.", "") for name, value in tensors.items()}
    with pytest.raises(ConfigError, match=r"the file has the weights of 2 networks, with the prefixes '', 'model\.'"):
        weights.read(write(tmp_path / "w.safetensors", both))


def torch_checkpoints(torch, network):
    """(what is saved, the network whose weights it holds) as torchvision, timm and Lightning save it."""
    averaged = torch.optim.swa_utils.AveragedModel(network)
    with torch.no_grad():
        averaged.module.fc.bias += 1
    options = argparse.Namespace(lr=0.1)
    module = torch.nn.Module()
    module.model, module.metric = network, torch.nn.BatchNorm1d(2)
    return {
        "weights": (network.state_dict(), network),
        "average": (averaged.state_dict(), averaged.module),
        "torchvision": ({"model": network.state_dict(), "epoch": 3, "args": options, "optimizer": {}}, network),
        "torchvision's average": (
            {"model": network.state_dict(), "model_ema": averaged.state_dict(), "args": options},
            averaged.module,
        ),
        "timm": ({"epoch": 3, "arch": "resnet18", "state_dict": network.state_dict(), "args": options, "metric": 0.5}, network),
        "timm's average": (
            {"state_dict": network.state_dict(), "state_dict_ema": averaged.module.state_dict(), "args": options},
            averaged.module,
        ),
        "Lightning": ({"epoch": 3, "state_dict": module.state_dict(), "hyper_parameters": {"lr": 0.1}}, network),
    }


@pytest.mark.slow
def test_the_documented_code_converts_checkpoints_of_torchvision_timm_and_lightning(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    text = (Path(__file__).parents[2] / "docs/weights.md").read_text()
    (documented,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "torch.load" in block]
    monkeypatch.chdir(tmp_path)
    network = torch_layout.torch_network(*BASIC, **SIZES).to(memory_format=torch.channels_last)
    for kind, (saved, expected) in torch_checkpoints(torch, network).items():
        torch.save(saved, "resnet50.pth")
        with pytest.raises(ConfigError, match=r"convert it to safetensors with PyTorch, as docs/weights\.md shows"):
            weights.read("resnet50.pth")
        exec(documented, {})
        read = weights.read("resnet50.safetensors")
        for name, value in weights.named_tensors(read.params, read.batch_stats).items():
            theirs = expected.state_dict()[torch_name(name)].numpy()
            np.testing.assert_array_equal(to_torch_layout(value), theirs, err_msg=kind)
