"""Tests of jaxdp.inference.predict."""

import dataclasses
import errno
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.flowers import CLASSES, config_for_any_mesh, held_out_files, make_flowers
from helpers.step import with_parts
from PIL import Image

import jaxdp
from jaxdp import ConfigError, evaluate, predict
from jaxdp.config import Config, Data, Model
from jaxdp.data import decode as decode_module
from jaxdp.data.decode import ImageError, decode
from jaxdp.data.sources import open_datasets
from jaxdp.errors import StorageError
from jaxdp.inference.evaluate import evaluate_weights
from jaxdp.inference.export import export
from jaxdp.inference.load_run import weights_config
from jaxdp.inference.predict import Images, Wanted, predict_weights
from jaxdp.validation import to_json


@pytest.fixture(scope="module")
def flowers(tmp_path_factory):
    """See `make_flowers`."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("flowers")
        make_flowers(root, patch)
        yield root


class Predicted(list):  # which is false before it has any
    def __call__(self, batch):
        return lambda classes: self.extend(zip(batch["positions"].tolist(), classes.tolist(), strict=True))


def test_predict_agrees_with_evaluate(flowers):
    files, observed = held_out_files(flowers), Predicted()
    images = [decode(file.read_bytes()) for file in files]
    labels = np.array([CLASSES.index(file.parent.name) for file in files])
    predictions = predict(flowers / "run", images, top=4)
    metrics = evaluate(config_for_any_mesh(flowers), flowers / "run", observer=observed)
    assert (predictions.classes.shape, predictions.classes.dtype) == ((14, 4), np.int32)
    assert np.mean(predictions.classes[:, 0] == labels) == metrics["eval_accuracy"]
    assert [dict(observed)[position] for position in range(14)] == predictions.classes[:, 0].tolist()
    of_label = predictions.probabilities[predictions.classes == labels[:, None]]
    assert -np.log(of_label.astype(np.float64)).mean() == pytest.approx(metrics["eval_loss"], rel=1e-4)
    np.testing.assert_allclose(predictions.probabilities.sum(1), 1, rtol=1e-5)
    assert (np.diff(predictions.probabilities) <= 0).all()
    names = [*CLASSES, "class 3"]  # the folder has three of the four classes
    assert predictions.names == [[names[k] for k in row] for row in predictions.classes]
    assert isinstance(predictions, jaxdp.Predictions)


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (jnp.zeros((80, 80, 3), jnp.uint8), "unsupported type: uint8 array of shape (80, 80, 3)"),
        (np.zeros((2, 80, 80, 3), np.float32), "unsupported type: float32 array"),
        (np.zeros((2, 80, 80, 4), np.uint8), "unsupported type: uint8 array"),
        (Image.new("RGB", (80, 80)), "unsupported type: Image"),
        (b"", "unsupported type: bytes"),
        ([None], "expected uint8 pixels"),
        ([], "no images given"),
    ],
)
def test_predict_unsupported_images_raises(flowers, images, reason):
    with pytest.raises(ConfigError) as error:
        predict(flowers / "run", images)
    assert error.value.field.startswith("images")
    assert error.value.reason.startswith(reason)


@pytest.mark.parametrize("top", ["3", 1.5, 0, 5])
def test_predict_top_out_of_range_raises(flowers, top):
    with pytest.raises(ConfigError) as error:
        predict(flowers / "run", np.zeros((2, 24, 20, 3), np.uint8), top=top)
    assert (error.value.field, error.value.value) == ("--top", top)
    assert error.value.reason == "must be an integer from 1 to 4, the number of classes"


def test_paths_gray_arrays_and_images_of_jax_and_pillow_are_accepted(flowers):
    files = held_out_files(flowers)[:2]
    expected = predict(flowers / "run", [decode(file.read_bytes()) for file in files]).classes
    np.testing.assert_array_equal(predict(flowers / "run", files).classes, expected)
    np.testing.assert_array_equal(predict(flowers / "run", str(files[0])).classes, expected[:1])
    with pytest.raises(ConfigError, match=r"^none\.jpg: No such file or directory$"):
        predict(flowers / "run", "none.jpg")
    gray = np.random.default_rng(1).integers(0, 256, (3, 24, 20), np.uint8)
    images = np.repeat(gray[..., None], 3, axis=3)
    expected = predict(flowers / "run", images).classes
    for others in (gray, gray[..., None], jnp.asarray(images), [Image.fromarray(one) for one in images], list(images)):
        np.testing.assert_array_equal(predict(flowers / "run", others, top=np.int64(4)).classes, expected)


def test_evaluate_a_run_with_images_from_python_says_how(flowers):
    config = dataclasses.replace(config_for_any_mesh(flowers), data=Data(source="given", image_size=16))
    call = rf"jaxdp.evaluate\(None, '{flowers / 'run'}', datasets=\(training, evaluation\)\)"
    with pytest.raises(ConfigError, match=f"^data.source='given': the run was given its images from Python; .* {call}$"):
        evaluate(config, flowers / "run")


def test_evaluate_prints_what_it_ignores(flowers, tmp_path, capsys):
    config = config_for_any_mesh(flowers)
    evaluate(config, flowers / "run")
    assert capsys.readouterr().err == ""
    root = tmp_path / "flowers"
    shutil.copytree(flowers / "flowers", root)
    shutil.copy(root / "val/rose/3.png", root / "val")
    evaluate(with_parts(config, data={"directory": str(root)}), flowers / "run")
    warning = f"jaxdp: ignored 1 image without a class, directly in {root}/val, {root}/val/3.png first\n"
    assert capsys.readouterr().err == warning


def test_folders_named_by_numbers_have_these_labels_and_need_no_training_images(tmp_path):
    """As ImageNet-V2's: not the alphabetical order 0, 1, 10, 11, 2."""
    for label in range(12):
        folder = tmp_path / "images/val" / str(label)
        folder.mkdir(parents=True)
        Image.new("RGB", (16, 16), (20 * label, 0, 0)).save(folder / "0.png")
    config = Config(data=Data(source="folder", directory=str(tmp_path / "images"), image_size=16), model=Model(classes=12))
    data = open_datasets(config, may_lack_classes=True).evaluation
    images, labels = data.batch(np.arange(12), np.arange(12))
    assert (images[:, 0, 0, 0] // 20).tolist() == labels.tolist() == list(range(12))


def test_an_exported_file_keeps_the_names_of_its_classes(flowers, tmp_path):
    """A table of two of the classes, which it numbers in another way than the run."""
    path, files = tmp_path / "run.safetensors", [file for file in held_out_files(flowers) if file.parent.name != CLASSES[0]]
    shutil.copytree(flowers / "run", tmp_path / "run")
    (tmp_path / "run/config.json").write_text(to_json(config_for_any_mesh(flowers)))
    export(tmp_path / "run", path)
    rows = [f"{file},{file.parent.name}" for file in files]
    (tmp_path / "val.csv").write_text("\n".join(["path,label", *rows]))
    config = dataclasses.replace(weights_config(path), data=dataclasses.replace(weights_config(path).data, source="file"))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, directory=str(tmp_path)))
    metrics, _ = evaluate_weights(path, config)
    predictions = predict(flowers / "run", files, top=1)
    assert metrics["eval_accuracy"] == np.mean(
        [names == [f.parent.name] for names, f in zip(predictions.names, files, strict=True)]
    )
    found, _ = predict_weights(path, Images(files), wanted=Wanted(top=1))
    assert found.predictions.names == predictions.names


def test_errors_that_may_pass_say_nothing_about_an_image(tmp_path, monkeypatch):
    monkeypatch.setattr(decode_module.time, "sleep", lambda seconds: None)
    (tmp_path / "a.png").write_bytes(b"content")
    images, read, errors = Images([tmp_path / "a.png"]), decode_module.read_regular, [errno.EIO] * 3

    def failing(path):
        if errors:
            raise OSError(errors.pop(), "broken", path)
        return read(path)

    monkeypatch.setattr(decode_module, "read_regular", failing)
    assert images[0] == (b"content", 0)
    errors += [errno.EIO] * 4
    with pytest.raises(StorageError, match="broken"):
        images[0]
    errors += [errno.ENOENT]
    with pytest.raises(ImageError, match="broken"):
        images[0]
