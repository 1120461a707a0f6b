"""Squeeze-and-excitation, BlurPool, drop-path and ResNet-D in whole networks."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import torch_layout
from helpers.images import encode, noise
from safetensors.numpy import load_file, save_file

from jaxdp import ConfigError, models
from jaxdp.cli import main
from jaxdp.config import Model
from jaxdp.models import resnet, weights
from jaxdp.models.resnet import TWO_BLOCKS
from jaxdp.models.summary import summary
from jaxdp.models.torch_weights import COUNTER, to_torch

FORMS = ["activations", "convolutions", "convolutions_and_pool"]


@pytest.fixture
def two_blocks(monkeypatch):
    """Reduce ResNet-18 and ResNet-50 to two blocks."""
    monkeypatch.setitem(resnet.BLOCKS, 18, (1, 1))
    monkeypatch.setitem(resnet.BLOCKS, 50, (1, 1))


def random_images(count=2, size=33, seed=0):
    return np.random.default_rng(seed).normal(size=(count, size, size, 3)).astype(np.float32)


# Millions of parameters and 1e9 multiply-adds in timm's results/benchmark-infer-fp32-*.csv, which counts other layers too: 4.11
# for the 4.089 of ResNet-50's convolutions.
@pytest.mark.parametrize(
    ("config", "millions", "giga_macs"),
    [
        (Model(classes=1000, depth=18, squeeze_excitation=True), 11.78, 1.82),
        (Model(classes=1000, depth=50, squeeze_excitation=True), 28.09, 4.11),
        (Model(classes=1000, depth=50, blur_pool="activations"), 25.56, 5.16),
        (Model(classes=1000, depth=50, stem="deep", shortcut="pooled"), 25.58, 4.35),
    ],
    ids=lambda value: value.title if isinstance(value, Model) else "",
)
def test_size_is_that_of_timms_table(config, millions, giga_macs):
    counted = summary(config, (224, 224, 3))
    assert round(counted["parameters"] / 1e6, 2) == millions
    assert counted["macs"] / 1e9 == pytest.approx(giga_macs, abs=0.035)


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("form", ["none", *FORMS])
def test_logits_equal_numpy_in_float64(two_blocks, tmp_path, form, bottleneck):
    """Imported weights; squeeze-and-excitation is found in their names."""
    tensors = torch_layout.random_tensors(1, (1, 1), bottleneck, width=16, classes=6, excitation=True)
    save_file(tensors, tmp_path / "w.safetensors")
    read = weights.read(tmp_path / "w.safetensors", blur_pool=form)
    assert (read.model.squeeze_excitation, read.model.blur_pool) == (True, form)
    images, model = random_images(), models.create(read.model)
    found = jax.jit(lambda *given: model.apply(*given, train=False)[0])(read.params, read.batch_stats, images)
    expected = torch_layout.logits(tensors, images.transpose(0, 3, 1, 2), blur_pool=form)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("form", ["none", "activations"])
def test_form_d_equals_numpy_in_float64_and_goes_back_unchanged(two_blocks, tmp_path, form, bottleneck):
    """The names show it, in the file of timm and in that of jaxdp. Maps of 9 x 9 are pooled."""
    tensors = torch_layout.random_tensors(1, (1, 1), bottleneck, width=16, classes=6, form_d=True)
    save_file({f"module.{name}": value for name, value in tensors.items()}, tmp_path / "theirs.safetensors")
    read = weights.read(tmp_path / "theirs.safetensors", blur_pool=form)
    assert (read.model.width, read.model.stem, read.model.shortcut) == (16, "deep", "pooled")
    images, model = random_images(), models.create(read.model)
    found = jax.jit(lambda *given: model.apply(*given, train=False)[0])(read.params, read.batch_stats, images)
    expected = torch_layout.logits(tensors, images.transpose(0, 3, 1, 2), blur_pool=form)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    named = weights.named_tensors(read.params, read.batch_stats)
    save_file(named, tmp_path / "ours.safetensors")
    again = weights.read(tmp_path / "ours.safetensors", blur_pool=form)
    assert (again.model, again.digest, again.naming) == (read.model, read.digest, "jaxdp")
    exported = {name: value for name, value in to_torch(named, steps=0).items() if not name.endswith(COUNTER)}
    assert exported.keys() == tensors.keys()
    assert all(np.array_equal(exported[name], value) for name, value in tensors.items())


@pytest.mark.parametrize(
    "variant",
    [
        {"stem": "deep", "shortcut": "pooled", "squeeze_excitation": True, "drop_path": 0.5, "blur_pool": "activations"},
        pytest.param({"drop_path": 0.5, "batch_norm": "folded", "remat": True}, marks=pytest.mark.slow),
    ],
    ids=lambda variant: ", ".join(variant),
)
@pytest.mark.parametrize("depth", [TWO_BLOCKS, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("direct_convolutions")
def test_gradient_equals_the_one_that_jax_derives(two_blocks, depth, variant):
    """The same draws of drop-path in both; the moments, too, which are those of the unmasked branch."""
    config = partial(Model, depth=depth, width=16, classes=5)
    plain = {name: value for name, value in variant.items() if name not in ("batch_norm", "remat")}
    images = jnp.asarray(random_images(8, 32, seed=1))  # none for which rounding decides on which side of a ReLU's kink it is
    params, stats = jax.jit(lambda: models.create(config(**variant)).init(jax.random.key(0), (32, 32, 3)))()
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda leaf: leaf + np.float32(0.1) * rng.normal(size=leaf.shape).astype(np.float32), params)

    def gradient(config, **options):
        def loss(params):
            logits, moments = models.create(config, **options).apply(params, stats, images, train=True, key=jax.random.key(2))
            return jnp.sin(logits).sum(), moments

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    own, derived = gradient(config(**variant)), gradient(config(**plain), custom_vjp=False)
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(derived), strict=True):
        assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other) + 1e-6


def test_file_states_its_form_and_flags_state_it_for_others(two_blocks, tmp_path, capsys):
    tensors = torch_layout.random_tensors(1, (1, 1), False, width=16, classes=6)
    theirs, ours = tmp_path / "w.safetensors", tmp_path / "ours.safetensors"
    save_file(tensors, theirs)
    main.main(["import", str(theirs), "--output", str(ours), "--blur-pool", "convolutions"])
    assert "ResNet-18 with BlurPool (convolutions), 6 classes" in capsys.readouterr().out
    assert weights.read(ours, blur_pool="activations").model.blur_pool == "convolutions"
    assert load_file(ours).keys() == weights.named_tensors(*weights.read(theirs)[2:4]).keys()
    for architecture, form in (("resnetblur18", "activations"), ("resnet18", "none"), ("vit", "convolutions")):
        (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture}))
        assert weights.read(theirs, blur_pool="convolutions").model.blur_pool == form
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnetblur18"}))
    with pytest.raises(SystemExit):
        main.main(["import", str(theirs), "--output", str(tmp_path / "no.safetensors"), "--blur-pool", "none"])
    assert "--blur-pool='none': " in capsys.readouterr().err
    save_file(tensors, tmp_path / "odd.safetensors", {"model": json.dumps({"blur_pool": "cubic"})})
    with pytest.raises(ConfigError, match="its metadata states the BlurPool 'cubic', which jaxdp lacks"):
        weights.read(tmp_path / "odd.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnetaa50"}))
    with pytest.raises(ConfigError, match="the architecture 'resnetaa50', whose average pooling jaxdp lacks"):
        weights.read(theirs)


def test_file_without_a_form_says_which_one_was_taken_and_predict_and_evaluate_take_another(two_blocks, tmp_path, capsys):
    tensors = torch_layout.random_tensors(1, (1, 1), False, width=16, classes=6)
    theirs, image = tmp_path / "w.safetensors", tmp_path / "val/0/image.png"
    save_file(tensors, theirs)
    main.main(["import", str(theirs), "--output", str(tmp_path / "ours.safetensors")])
    assert "bytes, the file does not name its BlurPool; assumed: none\n" in capsys.readouterr().out
    assert weights.read(tmp_path / "ours.safetensors").notes == ()
    image.parent.mkdir(parents=True)
    pixels = noise(48, 48)
    image.write_bytes(encode(pixels, "PNG"))
    size = ["--data.eval-size", "48", "--data.eval-resize", "48"]
    predict = ["predict", "--weights", str(theirs), *size, "--top", "6", "--json", str(image)]
    evaluate = ["evaluate", "--weights", str(theirs), *size, "--data.source", "folder", "--data.directory", str(tmp_path)]
    images = (pixels[None] / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    for flags, form in (([], "none"), (["--model.blur-pool", "activations"], "activations")):
        logits = torch_layout.logits(tensors, images.transpose(0, 3, 1, 2), blur_pool=form)[0]
        probabilities = np.exp(logits) / np.exp(logits).sum()
        main.main([*predict, *flags])
        out, err = capsys.readouterr()
        assert f"the file does not name its BlurPool; assumed: {form}" in err
        for entry in json.loads(out)["predictions"][0]["top"]:
            assert entry["probability"] == pytest.approx(probabilities[entry["class"]], rel=1e-4)
    main.main([*evaluate, "--model.blur-pool", "activations", "--json"])
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(-np.log(probabilities[0]), rel=1e-4)
    for command, message in (
        ([*predict[:2], str(tmp_path / "ours.safetensors"), *predict[3:]], "--model.blur-pool='activations': "),
        (["predict", "--workdir", "runs/a", str(image)], "--model.blur-pool='activations': not used without --weights"),
    ):
        with pytest.raises(SystemExit):
            main.main([*command, "--model.blur-pool", "activations"])
        assert message in capsys.readouterr().err
