"""Predictions of a run on a folder of images: what evaluation counts, by name."""

import csv
import dataclasses
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
import saved_run
import torch_layout
from PIL import Image
from safetensors.numpy import save_file

import jaxdp
from jaxdp import ConfigError, cli, evaluate, predict
from jaxdp.config import Config, Data, Mesh, Model
from jaxdp.data import folder
from jaxdp.data.decode import decode
from jaxdp.data.folder import image_files
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
    assert f"jaxdp: 2 images by {place / 'run' / 'checkpoints' / '160'}" in err.splitlines()


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
        (jnp.zeros((80, 80, 3), jnp.uint8), r"uint8 of shape \(80, 80, 3\) is not allowed; give uint8 \[N, H, W, 3\]"),
        (np.zeros((2, 80, 80, 4), np.uint8), r"uint8 of shape \(2, 80, 80, 4\) is not allowed"),
        (Image.new("RGB", (80, 80)), r"Image is not allowed; give uint8 \[N, H, W, 3\], or a list of \[H, W, 3\]"),
        (None, "NoneType is not allowed"),
        (5, "int is not allowed"),
        ("picture.jpg", "str is not allowed"),
        ([None], r"images\[0\] is not allowed: it is object"),
        ([], "none is given; give at least one"),
    ],
)
def test_what_is_no_images_is_refused(place, images, message):
    with pytest.raises(ConfigError, match=message):
        predict(place / "run", images)


@pytest.mark.parametrize("top", ["3", 1.5, 0, 5])
def test_a_top_that_cannot_be_is_refused(place, top):
    with pytest.raises(ConfigError, match=f"--top: {top!r} is not allowed; the run has 4 classes; give 1 to 4"):
        predict(place / "run", np.zeros((2, 24, 20, 3), np.uint8), top=top)


def test_images_of_jax_and_of_pillow_are_told_as_numpys(place):
    images = np.random.default_rng(1).integers(0, 256, (3, 24, 20, 3), np.uint8)
    expected = predict(place / "run", images)
    for others in (jnp.asarray(images), [Image.fromarray(one) for one in images], list(jnp.asarray(images))):
        np.testing.assert_array_equal(predict(place / "run", others, top=np.int64(4)).classes, expected.classes)


def test_probabilities_that_are_not_finite_are_an_error_that_names_the_checkpoint(place, tmp_path, monkeypatch, capsys):
    weights = read(place / "w.safetensors")
    weights.batch_stats["bn1"]["var"][:] = -1.0
    saved_run.save(run_config(place / "run"), tmp_path / "run", weights.params, weights.batch_stats)
    code, out, err = failing(capsys, "--workdir", tmp_path / "run", held_out(place)[0], "--json")
    assert (code, out) == (2, "")
    assert f"the probabilities that {tmp_path / 'run' / 'checkpoints' / '160'} gives are not finite; give another one" in err


def test_folders_are_walked_as_in_training(tmp_path):
    """Links are followed, also where they lead back; what is hidden is left out, and what cannot be read is named."""
    inside, other = tmp_path / "inside", tmp_path / "other"
    for path in (inside / "a.png", inside / ".hidden.png", inside / ".trash" / "b.png", other / "deep" / "c.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (inside / "linked").symlink_to(other)
    (inside / "loop").symlink_to(inside)
    (inside / "gone.png").symlink_to(tmp_path / "nowhere")
    (inside / "itself").symlink_to(inside / "itself")
    os.mkfifo(inside / "pipe.png")
    found, left_out, bad = image_files([inside])
    assert found == [str(inside / "a.png"), str(inside / "linked" / "deep" / "c.png")]
    assert left_out == []
    assert bad == {
        str(inside / "gone.png"): "it is a link to nothing",
        str(inside / "itself"): "it is a link to nothing",
        str(inside / "pipe.png"): "it is no regular file",
    }
    with pytest.raises(ConfigError, match=r"pipe.png' is not allowed; it is no regular file"):
        image_files([inside / "pipe.png"])


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "open.png").touch()
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(folder.os, "scandir", refusing)
    assert image_files([tmp_path]) == ([str(tmp_path / "open.png")], [], {str(tmp_path / "closed"): "Permission denied"})
    with pytest.raises(ConfigError, match=r"has no image .*; .*closed cannot be read: Permission denied"):
        image_files([tmp_path / "closed"])


def test_file_names_of_any_bytes_are_told(place, tmp_path, monkeypatch, capsys):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")
    shutil.copy(held_out(place)[0], odd)
    arguments = ["predict", "--workdir", str(place / "run"), odd, "--top", "1"]
    cli.main([*arguments, "--csv", str(tmp_path / "told.csv")])
    assert b"/caf\xe9.png,1," in (tmp_path / "told.csv").read_bytes()
    for encoding in ("utf-8", "ascii"):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            cli.main(arguments)
        assert b"caf\\udce9.png: " in stdout.buffer.getvalue()


def test_a_table_touches_no_other_file_follows_links_and_is_written_into_pipes(place, tmp_path, capsys):
    arguments = ["predict", "--workdir", str(place / "run"), str(held_out(place)[0]), "--top", "1", "--csv"]
    table, mine, link, pipe = (tmp_path / name for name in ("q.csv", "q.csv.tmp", "link.csv", "pipe"))
    mine.write_text("mine")
    cli.main([*arguments, str(table)])
    told = table.read_bytes()
    assert (told[:10], mine.read_text()) == (b"image,rank", "mine")
    link.symlink_to(table)
    table.write_text("old")
    cli.main([*arguments, str(link), "--overwrite"])
    assert (link.is_symlink(), table.read_bytes()) == (True, told)
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as thread:
        read_through = thread.submit(pipe.read_bytes)
        cli.main([*arguments, str(pipe)])
        assert read_through.result(timeout=60) == told
    assert pipe.is_fifo()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("where", ["w.safetensors/told.csv", "flowers"])
def test_a_table_that_cannot_be_written_is_told_before_the_work(place, capsys, where):
    code, out, err = failing(capsys, "--workdir", place / "run", "no such image", "--csv", place / where)
    assert (code, out) == (2, "")
    assert f"--csv: '{place / where}' is not allowed; " in err


def test_an_older_run_has_numbers_for_names_and_a_damaged_list_is_told(tmp_path):
    assert class_names(tmp_path, 3) == ["0", "1", "2"]
    (tmp_path / "classes.json").write_text('["a", "b", "c", "d"]')
    with pytest.raises(ConfigError, match=r"its classes.json is no list of at most 3 names; mend or remove it"):
        class_names(tmp_path, 3)


def test_names_of_classes_are_utf_8_in_every_locale(tmp_path):
    code = (
        "import pathlib, sys; from jaxdp.training.workdir import class_names, keep_class_names;"
        "here = pathlib.Path(sys.argv[1]); keep_class_names(here, ['L\\xf6wenzahn']); print(ascii(class_names(here, 1)))"
    )
    plain = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    out = subprocess.run([sys.executable, "-c", code, tmp_path], env=plain, capture_output=True, text=True, check=True).stdout
    assert out.strip() == r"['L\xf6wenzahn']"
    assert "Löwenzahn".encode() in (tmp_path / "classes.json").read_bytes()
