"""Predictions, exports, model card and report of a run with several labels for each image."""

import csv
import dataclasses
import io
import json
import zipfile

import jax
import jax.export
import numpy as np
import pytest
from helpers.served import assert_close, random_images, save_random_run
from PIL import Image

import jaxdp
from jaxdp.cli import main
from jaxdp.config import Data, Optimizer
from jaxdp.errors import ConfigError
from jaxdp.inference.export import export
from jaxdp.inference.model_card import write_card

NAMES = ["cat", "dog", "bird", "fish", "ant", "bee"]


@pytest.fixture
def labels_run(tiny_resnet, tmp_path):
    """(the directory of a run with random weights, its probabilities [N, 6] of images)."""
    config = dataclasses.replace(tiny_resnet, task="labels", data=Data(source="given", image_size=16))
    config = dataclasses.replace(config, optimizer=Optimizer(loss="binary"))
    logits = save_random_run(config, tmp_path / "run")
    (tmp_path / "run/classes.json").write_text(json.dumps(NAMES))
    return tmp_path / "run", lambda images: 1 / (1 + np.exp(-np.asarray(logits(images), np.float64)))


def test_scores_are_sigmoids_and_labels_are_present_from_the_threshold_on(labels_run):
    run, probabilities = labels_run
    images = random_images(5, 16)
    expected = probabilities(images)
    for threshold in (None, 0.0, float(np.median(expected)), np.float32(1.0)):
        found = jaxdp.predict(run, images, top=2, threshold=threshold)
        np.testing.assert_allclose(found.scores, expected, atol=1e-5)
        assert (found.scores.dtype, found.classes.dtype, found.classes.shape) == (np.float32, np.int32, (5, 2))
        np.testing.assert_array_equal(found.probabilities, np.take_along_axis(found.scores, found.classes, 1))
        np.testing.assert_array_equal(found.classes, np.argsort(-found.scores, axis=1)[:, :2])
        least = 0.5 if threshold is None else threshold
        for present, scores in zip(found.present, found.scores, strict=True):
            assert present == [NAMES[k] for k in np.argsort(-scores) if scores[k] >= least]


def test_a_run_on_classes_has_scores_and_refuses_a_threshold(tiny_resnet, tmp_path):
    save_random_run(tiny_resnet, tmp_path / "run")
    found = jaxdp.predict(tmp_path / "run", random_images(3, 16), top=2)
    np.testing.assert_allclose(found.scores.sum(1), 1, rtol=1e-5)
    np.testing.assert_array_equal(found.probabilities, np.take_along_axis(found.scores, found.classes, 1))
    assert found.present is None
    with pytest.raises(ConfigError, match=r"^--threshold=0\.5: not possible with task='classes'; omit it$"):
        jaxdp.predict(tmp_path / "run", random_images(3, 16), threshold=0.5)


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan"), "0.5"])
def test_a_threshold_that_is_no_probability_is_refused(labels_run, threshold):
    with pytest.raises(ConfigError, match=r"^--threshold=.*: must be a probability from 0 to 1$"):
        jaxdp.predict(labels_run[0], random_images(3, 16), threshold=threshold)


@pytest.mark.parametrize("from_file", [False, True])
def test_command_shows_which_labels_are_present(labels_run, tmp_path, capsys, from_file):
    run, _ = labels_run
    images = random_images(3, 16)
    for number, pixels in enumerate(images):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    (tmp_path / "bad.png").write_text("no image")
    threshold = float(np.median(jaxdp.predict(run, images).scores))
    found = jaxdp.predict(run, images, threshold=threshold)
    source = ["--workdir", str(run)]
    if from_file:
        export(run, tmp_path / "w.safetensors")
        source = ["--weights", str(tmp_path / "w.safetensors")]

    def output(*options):
        files = [str(tmp_path / name) for name in ("0.png", "1.png", "2.png", "bad.png")]
        with pytest.raises(SystemExit) as stopped:  # for the unreadable image
            main.main(["predict", *source, "--threshold", str(threshold), "--top", "1", *options, *files])
        assert stopped.value.code == 1
        return capsys.readouterr().out

    def texts(row):
        return ", ".join(f"{name} {100 * found.scores[row][NAMES.index(name)]:.2f} %" for name in found.present[row])

    lines = [f"{tmp_path}/{row}.png: {texts(row) or 'no label'}" for row in range(3)]
    assert output().splitlines() == lines
    document = json.loads(output("--json"))
    table = tmp_path / "table.csv"
    output("--csv", str(table))
    assert output("--csv", "-") == table.read_text()
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert document["threshold"] == threshold
    for row, shown in enumerate(document["predictions"]):
        assert [one["name"] for one in shown["top"] if one["present"]] == found.present[row]
        assert len(shown["top"]) == max(1, len(found.present[row]))  # at least `--top`
        own = [line for line in rows if line["image"] == shown["image"]]
        assert [(line["name"], line["present"]) for line in own] == [(e["name"], str(int(e["present"]))) for e in shown["top"]]
    assert output("--threshold", "1").splitlines() == [f"{tmp_path}/{row}.png: no label" for row in range(3)]


def test_exports_have_sigmoids_and_name_the_task(labels_run, tmp_path):
    run, probabilities = labels_run
    images = random_images(3, 16)
    export(run, tmp_path / "m.jaxexport", format="stablehlo")
    call = jax.jit(jax.export.deserialize((tmp_path / "m.jaxexport").read_bytes()).call)
    assert_close(call(images)["probabilities"], probabilities(images))
    np.testing.assert_allclose(call(images)["probabilities"], jaxdp.predict(run, images).scores, atol=1e-6)
    metadata = json.loads(zipfile.ZipFile(tmp_path / "m.jaxexport").read("metadata.json"))
    assert (metadata["task"], metadata["mean_average_precision"], metadata["class_names"]) == ("labels", 0.5, NAMES)


def test_onnx_has_sigmoids_and_names_the_task(labels_run, tmp_path):
    run, probabilities = labels_run
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    images = random_images(3, 16)
    export(run, tmp_path / "m.onnx", format="onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    assert_close(session.run(["probabilities"], {"images": images})[0], probabilities(images))
    assert session.get_modelmeta().custom_metadata_map["task"] == "labels"


def test_card_speaks_of_labels(labels_run, tmp_path):
    card = write_card(labels_run[0], tmp_path / "card.md").read_text()
    assert "finds which labels an image has, of 6 labels." in card
    assert "metrics:\n- mean_average_precision\n" in card
    assert "| mean average precision | 0.5000 |\n" in card
    assert "Held-out loss (mean binary cross entropy): 1.0000." in card
    assert "Its sigmoid is the label's probability." in card
    for word in ("accuracy", "Accuracy", "classifies", "confidence", "assigned"):
        assert word not in card
