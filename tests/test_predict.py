"""Predictions of a run on a folder of images: what evaluation counts, by name."""

import csv
import dataclasses
import json

import numpy as np
import pytest
import saved_run
import torch_layout
from PIL import Image
from safetensors.numpy import save_file

import jaxdp
from jaxdp import ConfigError, cli, evaluate, predict
from jaxdp.config import Config, Data, Mesh, Model
from jaxdp.data.decode import decode
from jaxdp.data.sources import open_datasets
from jaxdp.models import resnet
from jaxdp.models.weights import read
from jaxdp.training.workdir import class_names, keep_class_names, run_config

NAMES = ["daisy", "Löwenzahn", "rose"]
CLASSES = sorted(NAMES)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with `flowers`, images of three colours in many sizes, and `run`, a run on them."""
    root, draw = tmp_path_factory.mktemp("predict"), np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 5)):
        for label, name in enumerate(CLASSES):
            folder = root / "flowers" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 160, (*draw.integers(16, 40, 2), 3))
                pixels[..., label] += 60
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    (root / "flowers" / "val" / CLASSES[0] / "0.png").unlink()  # classes of unequal size
    save_file(torch_layout.random_tensors(3, (1, 1), False, width=4, classes=4, stem=3), root / "w.safetensors")
    config = Config(
        name="flowers",
        data=Data(source="folder", directory=str(root / "flowers"), image_size=16),
        model=Model(depth=18, width=4, stem="small", classes=4),
        mesh=Mesh(vertical=64, horizontal=64),  # of the run; any mesh predicts
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(resnet.BLOCKS, 18, (1, 1))
        weights = read(root / "w.safetensors")
        saved_run.save(config, root / "run", weights.params, weights.batch_stats)
        keep_class_names(root / "run", open_datasets(config).classes)
        yield root


def held_out(place):
    return sorted((place / "flowers" / "val").rglob("*.png"))


def on_any_mesh(place):
    return dataclasses.replace(run_config(place / "run"), mesh=Mesh())


def test_predictions_count_what_evaluation_counts(place):
    files = held_out(place)
    images = [decode(file.read_bytes()) for file in files]
    labels = np.array([CLASSES.index(file.parent.name) for file in files])
    told, counted = predict(place / "run", images, top=4), evaluate(on_any_mesh(place), place / "run")
    assert (told.classes.shape, told.classes.dtype, told.probabilities.dtype) == ((14, 4), np.int32, np.float32)
    assert np.mean(told.classes[:, 0] == labels) == counted["eval_accuracy"]
    of_label = told.probabilities[told.classes == labels[:, None]]
    assert -np.log(of_label.astype(np.float64)).mean() == pytest.approx(counted["eval_loss"], rel=1e-4)
    np.testing.assert_allclose(told.probabilities.sum(1), 1, rtol=1e-5)
    assert (np.diff(told.probabilities) <= 0).all()
    assert told.names == [[[*CLASSES, "3"][k] for k in row] for row in told.classes]  # a class that the folder has not
    assert isinstance(told, jaxdp.Predictions)


def test_images_of_one_size_may_come_as_one_array_and_top_be_left_out(place):
    images = np.random.default_rng(1).integers(0, 256, (9, 24, 20, 3), np.uint8)
    told, listed = predict(place / "run", images), predict(place / "run", list(images[::-1]))
    assert told.classes.shape == (9, 4)
    np.testing.assert_array_equal(told.classes, listed.classes[::-1])


def failing(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["predict", *map(str, arguments)])
    return stopped.value.code, *capsys.readouterr()


def test_the_command_tells_files_and_folders_and_names_what_is_no_image(place, tmp_path, capsys):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    good, bad, note = tmp_path / "deep" / "er" / "a.PNG", tmp_path / "deep" / "b.jpg", tmp_path / "deep" / "notes.txt"
    good.write_bytes(held_out(place)[0].read_bytes())
    bad.write_text("no image")
    note.write_text("left out")
    given = ["--workdir", place / "run", held_out(place)[7], tmp_path / "deep", "--top", 2]
    code, out, err = failing(capsys, *given, "--json", "--csv", tmp_path / "told.csv")
    told = json.loads(out)
    assert (code, [row["image"] for row in told["predictions"]]) == (1, [str(held_out(place)[7]), str(good)])
    assert list(told["bad_images"]) == [str(bad)]
    assert told["left_out"] == [str(note)]
    assert f"{bad} cannot be used: it is no image" in err
    expected = predict(place / "run", [decode(held_out(place)[place_].read_bytes()) for place_ in (7, 0)], top=2)
    for row, classes, names, probabilities in zip(told["predictions"], *expected, strict=True):
        assert [one["class"] for one in row["top"]] == classes.tolist()
        assert [one["name"] for one in row["top"]] == names
        assert [one["probability"] for one in row["top"]] == pytest.approx(probabilities.tolist(), rel=1e-5)
    rows = list(csv.DictReader((tmp_path / "told.csv").read_text().splitlines()))
    assert [(row["image"], row["rank"]) for row in rows] == [
        (row["image"], str(k)) for row in told["predictions"] for k in (1, 2)
    ]
    code, _, err = failing(capsys, *given, "--csv", tmp_path / "told.csv")
    assert (code, "it is there already; give another file, or --overwrite" in err) == (2, True)
    code, out, err = failing(capsys, *given)
    assert (code, len(out.splitlines()), "1 files do not end as images do" in err) == (1, 2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "images: () is not allowed; give at least one file or folder"),
        (["{empty}"], "has no image (.jpg"),
        (["{empty}/none.png"], "none.png' is not allowed; there is no such file or folder"),
        (["{image}", "--top", "5"], "--top: 5 is not allowed; the run has 4 classes; give 1 to 4"),
        (["{image}", "--top", "0"], "--top: 0 is not allowed"),
        (["{image}", "--checkpoint", "17"], "--checkpoint: '17' is not allowed; give newest, best"),
        (["{image}", "--workdir", "{empty}"], "it holds no run (no config.json)"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(place, tmp_path, capsys, arguments, message):
    arguments = [text.format(empty=tmp_path, image=held_out(place)[0]) for text in arguments]
    code, out, err = failing(capsys, "--workdir", place / "run", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((80, 80, 3), np.uint8), r"uint8 of shape \(80, 80, 3\) is not allowed; give uint8 \[N, H, W, 3\]"),
        (np.zeros((2, 80, 80, 3), np.float32), r"float32 of shape \(2, 80, 80, 3\) is not allowed; give uint8 \[N, H, W, 3\]"),
        ([], "none is given; give at least one"),
    ],
)
def test_arrays_that_are_no_images_are_refused(place, images, message):
    with pytest.raises(ConfigError, match=message):
        predict(place / "run", images)


def test_an_older_run_has_numbers_for_names_and_a_damaged_list_is_told(tmp_path):
    assert class_names(tmp_path, 3) == ["0", "1", "2"]
    (tmp_path / "classes.json").write_text('["a", "b", "c", "d"]')
    with pytest.raises(ConfigError, match=r"its classes.json is no list of at most 3 names; mend or remove it"):
        class_names(tmp_path, 3)
