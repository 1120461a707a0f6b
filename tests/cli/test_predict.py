"""Tests of `jaxdp predict`."""

import csv
import io
import json
import os
import shutil
import sys

import pytest
from helpers.flowers import held_out_files, make_flowers
from helpers.saved_run import save_run

from jaxdp import predict
from jaxdp.cli import main
from jaxdp.data.decode import decode
from jaxdp.models.weights import read
from jaxdp.setup.run_dir import run_config


@pytest.fixture(scope="module")
def flowers(tmp_path_factory):
    """See `make_flowers`."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("flowers")
        make_flowers(root, patch)
        yield root


def fail_predict(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main.main(["predict", *map(str, arguments)])
    return stopped.value.code, *capsys.readouterr()


def test_predict_files_and_folders_writes_csv_and_json_and_reports_bad_images(flowers, tmp_path, capsys):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    good, bad, note = tmp_path / "deep" / "er" / "a.PNG", tmp_path / "deep" / "b.jpg", tmp_path / "deep" / "notes.txt"
    good.write_bytes(held_out_files(flowers)[0].read_bytes())
    bad.write_text("no image")
    note.write_text("left out")
    arguments = ["--workdir", flowers / "run", held_out_files(flowers)[7], tmp_path / "deep", "--top", 2]
    code, out, err = fail_predict(capsys, *arguments, "--json", "--csv", tmp_path / "predictions.csv")
    document = json.loads(out)
    assert (code, [row["image"] for row in document["predictions"]]) == (1, [str(held_out_files(flowers)[7]), str(good)])
    assert list(document["bad_images"]) == [str(bad)]
    assert document["left_out"] == [str(note)]
    assert f"jaxdp: cannot read {bad}: not an image of a known format" in err
    expected = predict(flowers / "run", [decode(held_out_files(flowers)[index].read_bytes()) for index in (7, 0)], top=2)
    for row, classes, names, probabilities in zip(document["predictions"], *expected[:3], strict=True):
        assert [one["class"] for one in row["top"]] == classes.tolist()
        assert [one["name"] for one in row["top"]] == names
        assert [one["probability"] for one in row["top"]] == pytest.approx(probabilities.tolist(), rel=1e-5)
    rows = list(csv.DictReader((tmp_path / "predictions.csv").read_text().splitlines()))
    assert [(row["image"], row["rank"]) for row in rows] == [
        (row["image"], str(k)) for row in document["predictions"] for k in (1, 2)
    ]
    code, _, err = fail_predict(capsys, *arguments, "--csv", tmp_path / "predictions.csv")
    assert (code, "file exists; use another file, or --overwrite" in err) == (2, True)
    code, out, err = fail_predict(capsys, *arguments)
    assert (code, len(out.splitlines()), "skipped 1 file without an image suffix" in err) == (1, 2, True)
    assert f"2 images predicted with {flowers / 'run' / 'checkpoints' / '160'}" in err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "images: missing; give at least one file or directory"),
        (["{empty}"], "has no images (.jpg"),
        (["{empty}/none.png"], "none.png': no such file or folder"),
        (["{image}", "--top", "5"], "--top=5: must be an integer from 1 to 4, the number of classes"),
        (["{image}", "--top", "0"], "--top=0: must be an integer from 1 to 4"),
        (["{image}", "--checkpoint", "17"], "--checkpoint='17': checkpoint not found; use result, newest, best"),
        (["{image}", "--workdir", "{empty}"], "it holds no run (no config.json)"),
    ],
)
def test_predict_invalid_arguments_print_one_line(flowers, tmp_path, failing, arguments, message):
    arguments = [text.format(empty=tmp_path, image=held_out_files(flowers)[0]) for text in arguments]
    assert message in failing("predict", "--workdir", flowers / "run", *arguments)


def test_predict_with_infinite_probabilities_names_the_checkpoint(flowers, tmp_path, monkeypatch, failing):
    weights = read(flowers / "w.safetensors")
    weights.batch_stats["bn1"]["var"][:] = -1.0
    save_run(run_config(flowers / "run"), tmp_path / "run", weights.params, weights.batch_stats)
    line = failing("predict", "--workdir", tmp_path / "run", held_out_files(flowers)[0], "--json")
    assert f"the probabilities predicted by {tmp_path / 'run' / 'checkpoints' / '160'} are not finite" in line


def test_predict_file_names_of_any_bytes_are_printed(flowers, tmp_path, monkeypatch, capsys):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")
    shutil.copy(held_out_files(flowers)[0], odd)
    arguments = ["predict", "--workdir", str(flowers / "run"), odd, "--top", "1"]
    main.main([*arguments, "--csv", str(tmp_path / "predictions.csv")])
    assert b"/caf\xe9.png,1," in (tmp_path / "predictions.csv").read_bytes()
    for encoding in ("utf-8", "ascii"):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            main.main(arguments)
        assert b"caf\\udce9.png: " in stdout.buffer.getvalue()


def test_csv_that_cannot_be_written_fails_before_prediction(flowers, failing):
    file = flowers / "w.safetensors/predictions.csv"
    assert f"--csv='{file}': " in failing("predict", "--workdir", flowers / "run", "no such image", "--csv", file)
