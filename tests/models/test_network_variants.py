"""BlurPool, drop-path and ResNet-D in whole networks."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import torch_layout
from helpers.images import encode, noise
from safetensors.numpy import save_file

from jaxdp import ConfigError, models
from jaxdp.cli import main
from jaxdp.config import Model
from jaxdp.models import weights
from jaxdp.models.resnet import TWO_BLOCKS
from jaxdp.models.summary import summary
from jaxdp.models.torch_weights import COUNTER, to_torch


def random_images(count=2, size=33, seed=0):
    return np.random.default_rng(seed).normal(size=(count, size, size, 3)).astype(np.float32)


# Millions of parameters and 1e9 multiply-adds in timm's results/benchmark-infer-fp32-*.csv, which counts other layers too: 4.11
# for the 4.089 of ResNet-50's convolutions.
@pytest.mark.parametrize(
    ("config", "millions", "giga_macs"),
    [
        (Model(classes=1000, depth=50, stem="deep", shortcut="pooled"), 25.58, 4.35),
    ],
    ids=lambda value: value.title if isinstance(value, Model) else "",
)
def test_size_is_that_of_timms_table(config, millions, giga_macs):
    counted = summary(config, (224, 224, 3))
    assert round(counted["parameters"] / 1e6, 2) == millions
    assert counted["macs"] / 1e9 == pytest.approx(giga_macs, abs=0.035)


# Layout of a file and what is read from it: stem and shortcut are found in its names and shapes.
LAYOUTS = {
    "plain": ({}, {}),
    "small": ({"stem": 3}, {"stem": "small"}),
    "form D": ({"form_d": True}, {"stem": "deep", "shortcut": "pooled"}),
}
FORMS = ["none", "convolutions", "convolutions_and_pool"]


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize(
    ("layout", "form"),
    [
        ("small", "none"),
        *(("plain", form) for form in FORMS),
        ("form D", "none"),
    ],
)
def test_logits_equal_numpy_in_float64_and_weights_go_back_unchanged(two_blocks, tmp_path, layout, form, bottleneck):
    """From a file of timm or torchvision, and from a file of jaxdp. Maps of 9 x 9 are pooled."""
    sizes, fields = LAYOUTS[layout]
    tensors = torch_layout.random_tensors(1, (1, 1), bottleneck, width=16, classes=6, **sizes)
    save_file({f"module.{name}": value for name, value in tensors.items()}, tmp_path / "theirs.safetensors")
    read = weights.read(tmp_path / "theirs.safetensors", blur_pool=form)
    assert read.model == Model(depth=50 if bottleneck else 18, width=16, classes=6, blur_pool=form, **fields)
    images, model = random_images(), models.create(read.model)
    found = jax.jit(lambda *given: model.apply(*given, train=False)[0])(read.params, read.batch_stats, images)
    small = layout == "small"
    expected = torch_layout.logits(tensors, images.transpose(0, 3, 1, 2), small_stem=small, blur_pool=form)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    named = weights.named_tensors(read.params, read.batch_stats)
    save_file(named, tmp_path / "ours.safetensors")
    again = weights.read(tmp_path / "ours.safetensors", blur_pool=form)
    assert (again.model, again.digest, again.naming) == (read.model, read.digest, "jaxdp")
    exported = {name: value for name, value in to_torch(named, steps=0).items() if not name.endswith(COUNTER)}
    assert exported.keys() == tensors.keys()
    assert all(np.array_equal(exported[name], value) for name, value in tensors.items())


EVERY_PART = {"stem": "deep", "shortcut": "pooled", "drop_path": 0.5, "blur_pool": "convolutions_and_pool"}


@pytest.mark.parametrize(
    ("depth", "variant"),
    [
        (TWO_BLOCKS, {}),
        (TWO_BLOCKS, EVERY_PART),
        *(
            pytest.param(depth, variant, marks=pytest.mark.slow)
            for depth, variant in (
                (50, {}),
                (50, EVERY_PART),
                (50, {"batch_norm": "folded", "remat": True}),
                (TWO_BLOCKS, {"drop_path": 0.5, "batch_norm": "folded", "remat": True}),
                (50, {"drop_path": 0.5, "batch_norm": "folded", "remat": True}),
            )
        ),
    ],
    ids=lambda value: ", ".join(value) or "plain" if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("direct_convolutions")
def test_gradient_equals_the_one_that_jax_derives(two_blocks, depth, variant):
    """The same draws of drop-path in both; the moments of the unmasked branch too."""
    config = partial(Model, depth=depth, width=16, classes=5)
    plain = {name: value for name, value in variant.items() if name not in ("batch_norm", "remat")}
    images = jnp.asarray(random_images(8, 32, seed=1))  # rounding decides the side of a ReLU's kink for none
    params, stats = jax.jit(lambda: models.create(config(**variant)).init(jax.random.key(0), (32, 32, 3)))()
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda p: np.asarray(p) + np.float32(0.1) * rng.normal(size=p.shape).astype(np.float32), params)

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
    main.main(["import", str(theirs), "--output", str(ours)])
    assert "bytes, the file does not name its BlurPool; assumed: none\n" in capsys.readouterr().out
    assert weights.read(ours).notes == ()
    main.main(["import", str(theirs), "--output", str(ours), "--blur-pool", "convolutions", "--overwrite"])
    assert "ResNet-18 with BlurPool (convolutions), 6 classes" in capsys.readouterr().out
    assert weights.read(ours, blur_pool="convolutions_and_pool").model.blur_pool == "convolutions"
    for architecture, form in (("vit", "convolutions"), ("resnet18", "none")):
        (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture}))
        assert weights.read(theirs, blur_pool="convolutions").model.blur_pool == form
    with pytest.raises(SystemExit):
        main.main(["import", str(theirs), "--output", str(tmp_path / "no.safetensors"), "--blur-pool", "convolutions"])
    assert "--blur-pool='convolutions': " in capsys.readouterr().err
    save_file(tensors, tmp_path / "odd.safetensors", {"model": json.dumps({"blur_pool": "cubic"})})
    with pytest.raises(ConfigError, match="'cubic'"):
        weights.read(tmp_path / "odd.safetensors")
    for architecture in ("resnetaa50", "resnetblur50"):
        (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture}))
        with pytest.raises(ConfigError, match=f"'{architecture}', whose filter jaxdp lacks"):
            weights.read(theirs)
    (tmp_path / "x.png").touch()
    for command, message in (
        (["predict", "--weights", str(ours), str(tmp_path / "x.png")], "--model.blur-pool='convolutions_and_pool': "),
        (["predict", "--workdir", "runs/a", "x.png"], "--model.blur-pool='convolutions_and_pool': not used without --weights"),
    ):
        with pytest.raises(SystemExit):
            main.main([*command, "--model.blur-pool", "convolutions_and_pool"])
        assert message in capsys.readouterr().err


def test_predict_and_evaluate_take_the_form_of_the_flag(two_blocks, tmp_path, capsys):
    tensors = torch_layout.random_tensors(1, (1, 1), False, width=16, classes=6)
    theirs, image, pixels = tmp_path / "w.safetensors", tmp_path / "val/0/image.png", noise(48, 48)
    save_file(tensors, theirs)
    image.parent.mkdir(parents=True)
    image.write_bytes(encode(pixels, "PNG"))
    given = ["--weights", str(theirs), "--data.eval-size", "48", "--data.eval-resize", "48", "--json"]
    given += ["--model.blur-pool", "convolutions_and_pool"]
    images = (pixels[None] / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    logits = torch_layout.logits(tensors, images.transpose(0, 3, 1, 2), blur_pool="convolutions_and_pool")[0]
    probabilities = np.exp(logits) / np.exp(logits).sum()
    main.main(["predict", *given, "--top", "6", str(image)])
    out, err = capsys.readouterr()
    assert "the file does not name its BlurPool; assumed: convolutions and pool" in err
    for entry in json.loads(out)["predictions"][0]["top"]:
        assert entry["probability"] == pytest.approx(probabilities[entry["class"]], rel=1e-4)
    main.main(["evaluate", *given, "--data.source", "folder", "--data.directory", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(-np.log(probabilities[0]), rel=1e-4)
