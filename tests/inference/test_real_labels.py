"""Evaluation with ImageNet's ReaL labels, and on data sets without training images."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from helpers.images import encode, noise
from helpers.saved_run import save_run

from jaxdp import ConfigError, evaluate, predict
from jaxdp.cli.main import main
from jaxdp.config import Data, Mesh, Model
from jaxdp.inference.real_labels import RealLabels
from jaxdp.models import create

CLASSES = 12
EMPTY: list[list[int]] = [[]] * 50_000


@pytest.fixture(params=[66, 32], ids=["decoded for each batch", "decoded once"])
def run(tiny, tmp_path, request):
    """(run directory, image files): a run with random weights, whose held-out images are in folders 0 to 11 beside no training
    images, two a class, as ImageNet-V2's."""
    files = []
    for label in range(CLASSES):
        folder = tmp_path / "images/val" / str(label)
        folder.mkdir(parents=True)
        for _ in range(2):
            files.append(folder / f"ILSVRC2012_val_{len(files) + 1:08d}.JPEG")
            files[-1].write_bytes(encode(noise(70, 70 + len(files))))
    data = Data(source="folder", directory=str(tmp_path / "images"), image_size=request.param)
    config = dataclasses.replace(
        tiny, data=data, model=Model(name="normalized_linear", classes=CLASSES), mesh=Mesh(cpu_devices=1)
    )
    model, shape = create(config.model), (request.param, request.param, 3)
    params, stats = jax.jit(lambda: model.init(jax.random.key(3), shape))()
    save_run(config, tmp_path / "run", params, stats)
    return tmp_path / "run", files


def test_real_accuracy_counts_predictions_among_the_labels_of_images_that_have_some(run, tmp_path, capsys):
    workdir, files = run
    predicted = predict(workdir, files, top=1).classes[:, 0].tolist()
    assert len(set(predicted)) > 2
    right, wrong = (lambda p: [(p + 1) % CLASSES, p]), (lambda p: [(p + 1) % CLASSES, (p + 2) % CLASSES])
    labels = [([], right(p), right(p), wrong(p))[n % 4] for n, p in enumerate(predicted)]
    (tmp_path / "real.json").write_text(json.dumps([*labels, *EMPTY[len(labels) :]]))
    result = evaluate(None, workdir, real_labels=tmp_path / "real.json")
    assert (result["real_accuracy"], result["real_examples"]) == (12 / 18, 18)
    main(["evaluate", "--workdir", str(workdir), "--real-labels", str(tmp_path / "real.json")])
    assert "ReaL accuracy 66.67 %  (18 images with labels)" in capsys.readouterr().out


def test_folders_named_by_numbers_have_these_labels(run):
    """Not those of the alphabetical order 0, 1, 10, 11, 2; and no training split is needed."""
    workdir, files = run
    predicted = predict(workdir, files, top=1).classes[:, 0]
    expected = np.mean(predicted == [int(file.parent.name) for file in files])
    assert evaluate(None, workdir)["eval_accuracy"] == expected


ENTRIES = ("3", '["2"]', "[1.0]", "[true]", "[-1]", "[1000]")


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"1": [3]}', "[[1], [2]]", *ENTRIES])
def test_unusable_real_labels_are_refused_with_one_line(tmp_path, content):
    """Entries are in lists that are long enough."""
    whole = f"{json.dumps(EMPTY[1:])[:-1]}, {content}]" if content in ENTRIES else content
    (tmp_path / "real.json").write_text(whole)
    with pytest.raises(ConfigError, match=r"\A--real-labels='.*': must be a JSON list of 50,000 lists .*\Z"):
        RealLabels(tmp_path / "real.json", source=object())


def test_real_labels_of_no_evaluated_image_are_refused(run, tmp_path):
    (tmp_path / "real.json").write_text(json.dumps(EMPTY))
    with pytest.raises(ConfigError, match="no evaluated image has a label there"):
        evaluate(None, run[0], real_labels=tmp_path / "real.json")


def test_real_labels_of_other_images_are_refused_before_the_evaluation(tmp_path):
    (tmp_path / "real.json").write_text(json.dumps(EMPTY))
    with pytest.raises(ConfigError, match=r"the evaluated image 0 is not one of ImageNet's validation set; use "):
        RealLabels(tmp_path / "real.json", source=object())
    with pytest.raises(ConfigError, match=r"^--real-labels='.*none/real.json': No such file or directory$"):
        RealLabels(tmp_path / "none/real.json", source=object())


def test_an_observer_sees_every_image_and_excludes_real_labels(run, tmp_path):
    class Predicted(list):  # which is false before it has any
        def __call__(self, batch):
            return lambda classes: self.extend(zip(batch["positions"].tolist(), classes.tolist(), strict=True))

    workdir, files = run
    predicted = Predicted()
    evaluate(None, workdir, observer=predicted)
    expected = predict(workdir, files, top=1).classes[:, 0].tolist()
    assert [dict(predicted)[position] for position in range(len(files))] == expected
    with pytest.raises(ConfigError, match=r"observer: real_labels observe the evaluation too; give one of the two"):
        evaluate(None, workdir, observer=predicted, real_labels=tmp_path / "real.json")
