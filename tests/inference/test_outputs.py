"""Logits, features and mirror images, beside a ResNet in NumPy with torchvision's layout in float64."""

import dataclasses
import re

import flax.linen as nn
import numpy as np
import pytest
from helpers import torch_layout
from helpers.saved_run import save_run
from helpers.served import random_images, save_random_run, softmax
from helpers.step import with_parts

import jaxdp
from jaxdp import ConfigError
from jaxdp.config import Data, Model
from jaxdp.models import weights
from jaxdp.setup.run_dir import run_config

IMAGES = random_images(5, 16)
LABELS = np.array([0, 1, 2, 3, 5])


@pytest.fixture
def trained(tiny_resnet, tmp_path):
    """(the directory of a run with a held-out share, f(output, flip) -> the expected output for IMAGES, float64)."""
    stated = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    config = dataclasses.replace(tiny_resnet, data=Data(source="given", image_size=16, threads=1, holdout=0.2, **stated))
    path, tensors = torch_layout.write_tiny_weights(tmp_path / "w.safetensors")
    of_run = weights.read(path)
    save_run(config, tmp_path / "run", of_run.params, of_run.batch_stats)
    as_features = tensors | {"fc.weight": np.eye(tensors["fc.weight"].shape[1]), "fc.bias": np.zeros(1)}

    def expected(output, flip=False):
        values = as_features if output == "features" else tensors
        pixels = (IMAGES / 255 - 0.5) / 0.25
        outputs = [
            torch_layout.logits(values, images.transpose(0, 3, 1, 2), small_stem=True)
            for images in (pixels, pixels[:, :, ::-1])
        ]
        return np.mean(outputs, axis=0) if flip else outputs[0]

    return tmp_path / "run", expected


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("output", ["logits", "features"])
def test_logits_and_features_are_those_of_the_network_in_float64(trained, output, flip):
    run, expected = trained
    found = jaxdp.predict(run, IMAGES, output=output, flip=flip)
    assert (found.dtype, found.shape) == (np.float32, expected(output).shape)
    np.testing.assert_allclose(found, expected(output, flip), rtol=0, atol=1e-4 * np.abs(expected(output)).max())
    assert np.abs(expected(output, flip) - expected(output, not flip)).max() > 1e-2  # the mirror image matters


def test_probabilities_and_evaluation_are_of_the_mean_logits(trained):
    run, expected = trained
    logits = expected("logits", flip=True)
    np.testing.assert_allclose(jaxdp.predict(run, IMAGES, flip=True).scores, softmax(logits), atol=1e-5)
    result = jaxdp.evaluate(None, run, datasets=((IMAGES, LABELS),) * 2, flip=True)
    assert result["eval_loss"] == pytest.approx(-np.log(softmax(logits)[np.arange(5), LABELS]).mean(), rel=1e-5)
    assert result["eval_accuracy"] == np.mean(logits.argmax(-1) == LABELS)


def test_another_held_out_share_than_in_training_is_named(trained, capsys):
    run, _ = trained
    config = with_parts(run_config(run), data={"holdout": 0.4})
    assert jaxdp.evaluate(config, run, datasets=((IMAGES, 0 * LABELS), None))["eval_examples"] == 2
    assert "data.holdout=0.4, in training 0.2: training images may count" in capsys.readouterr().err


@pytest.mark.usefixtures("own_programs")
def test_features_of_a_registered_model_are_the_mean_of_what_its_last_stage_receives(tiny, tmp_path):
    class Head(nn.Module):
        @nn.compact
        def __call__(self, tokens):  # [B, 4, 3]
            return nn.Dense(6)(tokens.mean(1))

    class Net(nn.Module):
        def setup(self):
            self.body, self.head = Tokens(), Head()

        def __call__(self, x):
            return self.head(self.body(x))

        def stages(self):
            return [self.body, self.head]

    class Tokens(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(3, (8, 8), 8)(x).reshape(len(x), 4, 3)

    jaxdp.register_model("tokens", Net())
    save_random_run(dataclasses.replace(tiny, model=Model(name="tokens", classes=6)), tmp_path / "run")
    head = jaxdp.load_params(tmp_path / "run")["params"]["head"]["Dense_0"]
    features, logits = (jaxdp.predict(tmp_path / "run", IMAGES, output=output) for output in ("features", "logits"))
    assert features.shape == (5, 3)
    np.testing.assert_allclose(features.astype(np.float64) @ head["kernel"] + head["bias"], logits, atol=1e-5)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"output": "feature"}, "output='feature': invalid choice; did you mean features?"),
        ({"output": "logits", "top": 2}, "--top=2: not possible with output='logits'; omit it"),
        ({"output": "features"}, "output='features': the model 'normalized_linear' has no stages"),
    ],
)
def test_what_cannot_be_returned_is_refused(tiny, tmp_path, wanted, reason):
    save_random_run(tiny, tmp_path / "run")
    with pytest.raises(ConfigError, match=re.escape(reason)):
        jaxdp.predict(tmp_path / "run", IMAGES, **wanted)
