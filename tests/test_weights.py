"""Weights in and out of torchvision's names: the same logits, against a network written from that layout alone."""

import io
import json
import os
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saved_run
import torch_layout
from safetensors.flax import save_file as save_as_jax
from safetensors.numpy import load_file, save_file

from jaxdp import ConfigError, cli, models
from jaxdp.models import resnet, weights
from jaxdp.models.torch_weights import to_torch
from jaxdp.training.restored import export, restored

SIZES = {"width": 4, "classes": 6}
BASIC, BOTTLENECK = ((1, 1), False), ((1, 1), True)


@pytest.fixture(autouse=True)
def two_blocks(monkeypatch):
    """ "ResNet-18" and "ResNet-50" of two blocks."""
    monkeypatch.setitem(resnet.BLOCKS, 18, (1, 1))
    monkeypatch.setitem(resnet.BLOCKS, 50, (1, 1))


def written(path, held, **changes):
    """A file of these tensors, with some changed (None: left out)."""
    held = {name: value for name, value in (held | changes).items() if value is not None}
    save_file(held, path)
    return path


def our_logits(held: weights.Weights, images):
    model = models.create(held.model)
    return jax.jit(lambda *given: model.apply(*given, train=False)[0])(held.params, held.batch_stats, images)


def some_images(seed=0, count=3, size=24):
    return np.random.default_rng(seed).normal(size=(count, size, size, 3)).astype(np.float32)


@pytest.mark.parametrize("stem", [7, 3])
@pytest.mark.parametrize("network", [BASIC, BOTTLENECK])
def test_imported_weights_give_the_logits_of_torchvisions_layout(tmp_path, network, stem):
    held = torch_layout.random_tensors(1, *network, **SIZES, stem=stem)
    counters = {name.replace("running_var", "num_batches_tracked"): np.array(7) for name in held if "running_var" in name}
    read = weights.read(written(tmp_path / "w.safetensors", held | (counters if stem == 7 else {})))
    assert (read.model.depth, read.model.width, read.model.classes) == (50 if network[1] else 18, 4, 6)
    assert (read.model.stem, read.form) == ({7: "imagenet", 3: "small"}[stem], "torchvision")
    images = some_images()
    expected = torch_layout.logits(held, images.transpose(0, 3, 1, 2), small_stem=stem == 3)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(our_logits(read, images), expected, rtol=0, atol=1e-4)


def test_an_export_in_torchvisions_names_gives_the_runs_logits_and_comes_back_bit_by_bit(tiny, tmp_path, capsys):
    random = written(tmp_path / "w.safetensors", torch_layout.random_tensors(1, *BASIC, **SIZES, stem=3))
    held = weights.read(random)
    saved_run.save(tiny, tmp_path / "run", held.params, held.batch_stats)
    file = tmp_path / "out" / "w.safetensors"
    told = export(tmp_path / "run", file, form="torchvision")
    assert (told["format"], len(told["remarks"])) == ("torchvision", 2)
    assert "mean 0.5 and standard deviation 0.2039 of pixels from 0 to 1" in told["remarks"][1]
    held = load_file(file)
    steps = {name: held.pop(name) for name in list(held) if name.endswith("num_batches_tracked")}
    assert {int(value) for value in steps.values()} == {saved_run.STEPS}
    assert {name: value.shape for name, value in held.items()} == torch_layout.tensors(*BASIC, **SIZES, stem=3)
    params, batch_stats = restored(tmp_path / "run")[0].evaluated
    images = some_images(size=16)
    model = models.create(tiny.model)
    ours = jax.jit(lambda: model.apply(params, batch_stats, images, train=False)[0])()
    expected = torch_layout.logits(held, images.transpose(0, 3, 1, 2), small_stem=True)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)

    back = tmp_path / "back.safetensors"
    cli.main(["import", str(file), "--output", str(back), "--json"])
    assert json.loads(capsys.readouterr().out)["model"] == {"depth": 18, "width": 4, "stem": "small", "classes": 6}
    export(tmp_path / "run", tmp_path / "own.safetensors")
    own, imported = load_file(tmp_path / "own.safetensors"), load_file(back)
    assert own.keys() == imported.keys()
    for name, value in own.items():
        np.testing.assert_array_equal(imported[name], value)
    assert weights.read(back).form == "jaxdp"
    with pytest.raises(ConfigError, match=r"it is there already; give another file, or --overwrite"):
        export(tmp_path / "run", file)
    export(tmp_path / "run", file, form="timm", overwrite=True)
    assert load_file(file).keys() == held.keys() | steps.keys()


def test_half_precision_is_widened_without_rounding(tmp_path):
    held = torch_layout.random_tensors(2, *BASIC, **SIZES)
    read = weights.read(written(tmp_path / "w.safetensors", {name: value.astype(np.float16) for name, value in held.items()}))
    np.testing.assert_array_equal(read.params["fc_bias"], held["fc.bias"].astype(np.float16).astype(np.float32))
    short = {name: jnp.asarray(value, jnp.bfloat16) for name, value in held.items()}
    save_as_jax(short, tmp_path / "b.safetensors")
    read = weights.read(tmp_path / "b.safetensors")
    np.testing.assert_array_equal(read.params["fc_bias"], short["fc.bias"].astype(jnp.float32))


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({}, ["--depth", "50"], "--depth: 50 is not allowed; .* has 18; give that, or another file"),
        ({}, ["--classes", "7"], "--classes: 7 is not allowed; .* has 6"),
        ({}, ["--stem", "small"], "--stem: 'small' is not allowed; .* has 'imagenet'"),
        ({"fc.bias": None}, [], "it has no 'fc.bias'"),
        ({"layer2.0.bn1.weight": None}, [], "lacks 1 tensor of a ResNet-18, 'layer2.0.bn1.weight' first"),
        ({"aux.weight": np.zeros(2, np.float32)}, [], "has in excess of those 1 tensor of a ResNet-18, 'aux.weight' first"),
        ({"layer3.0.conv1.weight": np.zeros(2, np.float32)}, [], r"its stages have \(1, 1, 1\) basic blocks, which no ResNet"),
        ({"bn1.bias": np.zeros(5, np.float32)}, [], r"bn1.bias has the shape \(5,\), and ResNet-18 has \(4,\)"),
        ({"conv1.weight": np.zeros((4, 3, 5, 5), np.float32)}, [], "give a network with a stem of 7x7 or 3x3"),
        ({"conv1.weight": np.zeros(4, np.float32)}, [], "give a network with a stem of 7x7 or 3x3"),
        ({"conv1.weight": None}, [], "it has tensors such as 'bn1.bias'; give a ResNet with torchvision's"),
        ({"bn1.bias": np.full(4, np.nan, np.float32)}, [], "bn1.bias holds numbers that are not finite"),
        ({"bn1.bias": np.full(4, 1e300)}, [], "bn1.bias holds numbers that are not finite"),
        ({"bn1.bias": np.zeros(4, np.int32)}, [], "bn1.bias is I32, and F32, F16, BF16, F64 are read"),
        ({"bn1.running_var": np.full(4, -1e-3, np.float32)}, [], "bn1.running_var holds a variance below zero"),
        ({"fc.bias": np.zeros(0, np.float32)}, [], "it has no 'fc.bias' with one number for each class"),
        (
            {"layer2.0.conv1.weight": None, "layer1.1.conv1.weight": np.zeros(1, np.float32)},
            [],
            "depth 18, 34, 50, 101, 152 has",
        ),
        (
            {"conv1.weight": None, "conv1.0.weight": np.zeros(1, np.float32)},
            [],
            "it has tensors such as 'conv1.0.weight'; give",
        ),
        ({"module.epoch": np.zeros(1, np.float32)}, [], "it has.* 'module.epoch' first"),
    ],
)
def test_weights_that_do_not_fit_are_one_line_and_nothing_is_written(tmp_path, capsys, change, flags, message):
    file = written(tmp_path / "w.safetensors", torch_layout.random_tensors(0, *BASIC, **SIZES), **change)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["import", str(file), "--output", str(tmp_path / "out.safetensors"), *flags])
    (line,) = capsys.readouterr().err.splitlines()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(line)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def zipped(name: str) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr(name, b"a pickle")
    return held.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.safetensors", None, "No such file"),
        ("text.safetensors", b"no tensors at all", "it is no safetensors file"),
        ("cut.safetensors", b"\x90\x00\x00\x00\x00\x00\x00\x00{", "it is no safetensors file"),
        ("empty.safetensors", b"", "it is no safetensors file"),
        ("garbage.pth", b"garbage of some length", "it is no safetensors file"),
        ("photos.zip", zipped("photo.jpg"), "it is no safetensors file"),
        ("old.pth", pickle.dumps({}, 2), "it is pickled"),
        ("renamed.safetensors", zipped("archive/data.pkl"), "it is pickled"),
    ],
)
def test_what_is_no_safetensors_file_is_told(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        weights.read(tmp_path / name)


def test_a_pickled_files_conversion_overwrites_nothing_and_knows_checkpoints(tmp_path):
    file = tmp_path / "resnet50.pth"
    file.write_bytes(zipped("archive/data.pkl"))
    for free in ("resnet50.safetensors", "resnet50-2.safetensors"):
        with pytest.raises(ConfigError) as raised:
            weights.read(file)
        first, _, load, save = str(raised.value).splitlines()
        assert "it is pickled, and reading it could run code" in first
        assert load == f"  held = torch.load({str(file)!r}, weights_only=True)"
        assert save == f"  save_file(held.get('state_dict', held), {str(tmp_path / free)!r})"
        (tmp_path / free).touch()


def test_the_same_weights_have_one_digest_in_whatever_file_and_others_another(tmp_path):
    held = torch_layout.random_tensors(1, *BASIC, **SIZES)
    file = written(tmp_path / "w.safetensors", held)
    for name in ("one", "two"):
        cli.main(["import", str(file), "--output", str(tmp_path / f"{name}.safetensors")])
    save_file(dict(reversed(held.items())), tmp_path / "told.safetensors", {"epoch": "3", "source": "elsewhere"})
    digest = weights.read(file).digest
    for name in ("one", "two", "told"):
        assert weights.read(tmp_path / f"{name}.safetensors").digest == digest
    changed = held["layer2.0.bn2.running_mean"].copy()
    changed[3] += 1e-6
    assert (
        weights.read(written(tmp_path / "other.safetensors", held, **{"layer2.0.bn2.running_mean": changed})).digest != digest
    )


@pytest.mark.parametrize("prefix", ["module.", "state_dict.", "model.module.", "_orig_mod."])
def test_a_wrappers_prefix_is_left_out_and_said(tmp_path, capsys, prefix):
    held = torch_layout.random_tensors(1, *BASIC, **SIZES)
    file = written(tmp_path / "w.safetensors", {prefix + name: value for name, value in held.items()})
    read = weights.read(file)
    np.testing.assert_array_equal(read.params["fc_bias"], held["fc.bias"])
    assert read.in_words.endswith(f"names, without the prefix {prefix!r} of all")
    cli.main(["import", str(file), "--output", str(tmp_path / "out.safetensors")])
    assert f"out.safetensors, without the prefix {prefix!r} of all" in capsys.readouterr().out


def test_float64_is_rounded_and_said(tmp_path):
    held = {name: value.astype(np.float64) + 1e-9 for name, value in torch_layout.random_tensors(2, *BASIC, **SIZES).items()}
    read = weights.read(written(tmp_path / "w.safetensors", held))
    np.testing.assert_array_equal(read.params["fc_bias"], held["fc.bias"].astype(np.float32))
    assert read.in_words.endswith("names, rounded from float64 to float32")


def test_a_written_file_has_the_umasks_mode_and_no_file_beside_it_is_touched(tmp_path):
    file = written(tmp_path / "w.safetensors", torch_layout.random_tensors(1, *BASIC, **SIZES))
    mine = tmp_path / "out.safetensors.tmp"
    mine.write_text("mine")
    before = os.umask(0o027)
    try:
        weights.import_file(file, tmp_path / "out.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "out.safetensors").stat().st_mode & 0o777 == 0o640
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "out.safetensors.tmp", "w.safetensors"]


DEPTHS = {18: ((2, 2, 2, 2), False), 34: ((3, 4, 6, 3), False), 50: ((3, 4, 6, 3), True)}
DEPTHS |= {101: ((3, 4, 23, 3), True), 152: ((3, 8, 36, 3), True)}


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_pytorchs_logits_are_ours_both_ways(tmp_path, monkeypatch, depth):
    """float32, evaluation, random weights and statistics; ours read from its file, and it loads what ours writes."""
    torch = pytest.importorskip("torch")
    for number, (blocks, _) in DEPTHS.items():
        monkeypatch.setitem(resnet.BLOCKS, number, blocks)
    images = some_images(depth, 2, 96)
    peer = torch_layout.torch_network(*DEPTHS[depth])
    held = torch_layout.random_tensors(depth, *DEPTHS[depth])
    peer.load_state_dict({name: torch.from_numpy(value) for name, value in held.items()}, strict=True)

    def peers_logits():
        with torch.no_grad():
            return peer.eval()(torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))).numpy()

    def assert_equal(ours, theirs, which):
        assert np.abs(theirs).max() > 0.3
        print(f"ResNet-{depth} {which}: {np.abs(ours - theirs).max():.2e} of {np.abs(theirs).max():.2f}")
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)

    state = {name: value.numpy() for name, value in peer.state_dict().items()}
    read = weights.read(written(tmp_path / "theirs.safetensors", state))
    assert (read.model.depth, read.model.width, read.model.stem, read.model.classes) == (depth, 64, "imagenet", 1000)
    assert_equal(our_logits(read, images), peers_logits(), "in")

    other = torch_layout.random_tensors(depth + 1, *DEPTHS[depth])
    mine = weights.read(written(tmp_path / "others.safetensors", other))
    out = to_torch(weights.named(mine.params, mine.batch_stats), steps=3)
    peer.load_state_dict({name: torch.from_numpy(value) for name, value in out.items()}, strict=True)
    assert_equal(our_logits(mine, images), peers_logits(), "out")
