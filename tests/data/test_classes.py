"""Classes are matched by name between training and evaluation, within a run and afterwards, in every source."""

import dataclasses
import io
import shutil

import numpy as np
import pytest
from helpers.images import encode
from helpers.tfds_miniature import prepare_miniature
from PIL import Image

import jaxdp
from jaxdp.config import Config, Data
from jaxdp.data import sources
from jaxdp.data.classes import matching_labels
from jaxdp.data.datasets import with_classes
from jaxdp.errors import ConfigError

TRAINED = ["cat", "ape", "dog", "bee"]
OWN = ["bee", "cat", "ape"]  # another order of fewer classes
OF_IMAGES = ["ape", "ape", "bee", "cat", "cat", "cat"]
EXPECTED = [1, 1, 3, 0, 0, 0]  # their labels in TRAINED
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)
LABELS = np.array([OWN.index(name) for name in OF_IMAGES])


def error(reason, hint):
    return ConfigError("data", reason=reason, hint=hint)


@pytest.mark.parametrize(
    ("names", "trained", "expected"),
    [
        ("", "", None),
        ("ab", "ab", None),
        ("ab", "abc", None),
        ("b", "abc", [1]),
        ("cab", "abc", [2, 0, 1]),
        (["e\u0301", "a"], ["a", "é"], [1, 0]),
        (["crane", "crane", "a"], ["crane", "crane", "a"], None),  # as ImageNet's English names
        ("", "012", None),
        ("012", "", None),
        (["1", "10", "2"], "", [1, 10, 2]),  # folders of a run on numbers
        ("", "201", [1, 2, 0]),
        ("abd", "abc", "its class 'd' is none of the 3 in training, such as 'a'"),
        ("", "ab", "its labels are numbers, but were names in training, such as 'a'"),
        ("ab", "", "its class 'a' is a name, but labels were numbers in training"),
        (["0.0", "1.0"], "", "its class '0.0' is a name"),
        (["00", "01"], "", "its class '00' is a name"),
        ("aab", "aba", "several classes have the same name"),
    ],
)
def test_labels_follow_the_names(names, trained, expected):
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            matching_labels(names, trained, error=error)
    else:
        found = matching_labels(names, trained, error=error)
        assert expected == (found if found is None else found.tolist())


class Named(list):
    class_names = OWN


def write_folder(path):
    for split in ("train", "val"):
        for number, name in enumerate(OF_IMAGES):
            (path / split / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(PIXELS[number]).save(path / split / name / f"{number}.png")
    return Data(source="folder", directory=str(path), image_size=32)


def write_table(path):
    write_folder(path)
    rows = [f"{split}/{name}/{n}.png,{name},{split}" for split in ("train", "val") for n, name in enumerate(OF_IMAGES)]
    (path / "table.csv").write_text("\n".join(["path,label,split", *rows]))
    return Data(source="file", directory=str(path / "table.csv"), image_size=32)


def write_npz(path):
    np.savez(path / "train.npz", images=PIXELS, labels=LABELS, class_names=OWN)
    names = sorted(OWN)  # another order for the held-out images
    np.savez(path / "val.npz", images=PIXELS, labels=[names.index(name) for name in OF_IMAGES], class_names=names)
    return Data(source="file", directory=str(path), image_size=32)


def write_cifar(path):
    (path / "batches.meta.txt").write_text("\n".join(OWN))
    records = np.column_stack([LABELS.astype(np.uint8), PIXELS.transpose(0, 3, 1, 2).reshape(6, -1)])
    for file in ("test_batch", *(f"data_batch_{number}" for number in range(1, 6))):
        records.tofile(path / f"{file}.bin")
    return Data(source="file", directory=str(path), image_size=32)


def write_tfds(path):
    import tensorflow_datasets as tfds

    features = {"image": tfds.features.Image(encoding_format="png"), "label": tfds.features.ClassLabel(names=OWN)}
    pairs = list(zip(PIXELS, OF_IMAGES, strict=True))
    splits = {split: [(io.BytesIO(encode(x, "PNG")), {"label": name}) for x, name in pairs] for split in ("train", "test")}
    prepare_miniature(path, name="animals", version="1.0.0", features=features, splits=splits)
    return Data(source="animals", directory=str(path), image_size=32)


def give(path):
    return Data(source="given", image_size=32)


@pytest.mark.parametrize(
    "write",
    [
        write_folder,
        write_table,
        write_npz,
        write_cifar,
        write_tfds,
        give,
    ],
)
@pytest.mark.parametrize("evaluates", [True, False])
def test_every_source_gives_the_labels_of_the_run(tmp_path, write, evaluates):
    items = Named(zip(PIXELS, LABELS.tolist(), strict=True))
    config, pair = Config(data=write(tmp_path)), (items, items) if write is give else None
    config = with_classes(config, 4 if evaluates else None)
    opened = sources.open_datasets(config, pair, may_lack_classes=evaluates, trained=TRAINED)
    order = sorted if write is write_tfds else list  # it shuffles
    repeats = len(opened.train) // 6  # the training split of CIFAR has five files
    rows = np.arange(6 * repeats)
    assert order(opened.train.batch(rows, rows)[1]) == order(EXPECTED * repeats)
    assert order(opened.evaluation.batch(rows[:6], rows[:6])[1]) == order(EXPECTED)
    assert (opened.class_count, opened.classes, opened.warnings) == (4, tuple(TRAINED), ())
    kind = "evaluation" if evaluates else "training"
    for other, reason in (([], "a name, but labels were numbers"), (["cat", "dog", "bee", "cow"], "none of the 4")):
        with pytest.raises(ConfigError, match=rf"the {kind} set is of other classes: its class '\w+' is {reason}"):
            sources.open_datasets(config, pair, may_lack_classes=evaluates, trained=other)


def test_digits_and_generated_images_have_numbers():
    for name in ("digits", "synthetic"):
        config = with_classes(Config(data=Data(source=name, image_size=8)), 10)
        plain = sources.open_datasets(config)
        same = sources.open_datasets(config, trained=[] if name == "digits" else list("0123456789"))
        np.testing.assert_array_equal(same.evaluation.batch(np.arange(9))[1], plain.evaluation.batch(np.arange(9))[1])
        with pytest.raises(ConfigError, match=r"none of the 10 in training|are numbers, but were names in training"):
            sources.open_datasets(config, trained=list("abcdefghij"), may_lack_classes=True)
    digits = with_classes(Config(data=Data(source="digits", image_size=8)), 10)
    reverse = sources.open_datasets(digits, trained=list("9876543210"))
    for split in ("train", "evaluation"):
        np.testing.assert_array_equal(getattr(reverse, split).labels, 9 - getattr(sources.open_datasets(digits), split).labels)
    with pytest.raises(ConfigError, match="its numbers are in a different order"):
        sources.open_datasets(config, trained=list("9876543210"))


def test_names_of_one_set_from_python_are_those_of_both_and_others_are_refused(tmp_path):
    """As with torchvision's ImageFolder and a Subset of one, which has no names."""
    items = [(PIXELS[n], int(LABELS[n])) for n in range(6)]
    config = Config(data=give(tmp_path))
    for pair in ((Named(items), items), (items, Named(items))):
        opened = sources.open_datasets(config, pair, trained=TRAINED)
        for split in (opened.train, opened.evaluation):
            assert split.batch(np.arange(6), np.arange(6))[1].tolist() == EXPECTED
    other = type("Other", (list,), {"class_names": ["ape", "bee", "cow"]})(items)
    with pytest.raises(ConfigError, match="the evaluation set is of other classes: its class 'cow' is none of the 3"):
        sources.open_datasets(config, (Named(items), other))


def test_names_that_are_numbers_beyond_the_classes_of_a_run_are_refused(tmp_path):
    items = type("Folders", (list,), {"class_names": ["0", "1", "7"]})((PIXELS[n], int(LABELS[n])) for n in range(6))
    for evaluates, pair in ((True, (items, items)), (False, ([*items], items)), (False, (items, [*items]))):
        config = with_classes(Config(data=give(tmp_path)), 3)
        with pytest.raises(ConfigError, match="has 8 classes"):
            sources.open_datasets(config, pair, may_lack_classes=evaluates, trained=[])
        opened = sources.open_datasets(with_classes(config, 8), (items, items), may_lack_classes=evaluates, trained=[])
        assert set(opened.evaluation.batch(np.arange(6), np.arange(6))[1].tolist()) == {0, 1, 7}


@pytest.mark.parametrize("attribute", ["class_names", "classes"])
def test_names_may_be_an_array(tmp_path, attribute):
    items = type("Array", (list,), {attribute: np.array(OWN)})((PIXELS[n], int(LABELS[n])) for n in range(6))
    opened = sources.open_datasets(Config(data=give(tmp_path)), (items, items), trained=TRAINED)
    assert opened.train.batch(np.arange(6), np.arange(6))[1].tolist() == EXPECTED


@pytest.fixture
def six(tmp_path):
    """six(folder, order, form): writes an .npz of 60 training and 40 held-out images of six classes, numbered in this order."""

    def write(folder, order=(0, 1, 2, 3, 4, 5), form="n{}"):
        random, arrays = np.random.default_rng(1), {}
        for split, count in (("train", 60), ("test", 40)):
            classes = np.arange(count) % 6
            noise = random.integers(0, 200, (count, 16, 16, 3))
            arrays[f"{split}_images"] = (noise + 10 * classes[:, None, None, None]).astype(np.uint8)
            arrays[f"{split}_labels"] = np.argsort(order)[classes]
        names = {"class_names": [form.format(number) for number in order]} if form else {}
        np.savez(tmp_path / f"{folder}.npz", **arrays, **names)
        return Data(source="file", directory=str(tmp_path / f"{folder}.npz"), image_size=16)

    return write


def test_a_run_evaluates_and_resumes_on_its_classes_in_another_order(tiny, six, tmp_path, capsys):
    order = (3, 0, 5, 1, 4, 2)
    config = dataclasses.replace(tiny, data=six("first"), batch=tiny.batch[-1:], epochs=1.5)
    longer = dataclasses.replace(config, epochs=2.0)
    moved = dataclasses.replace(longer, data=six("moved", order))
    jaxdp.train(config, tmp_path / "run")
    evaluated = jaxdp.evaluate(config, tmp_path / "run")
    assert 0 < evaluated["eval_accuracy"] < 1
    assert jaxdp.evaluate(dataclasses.replace(config, data=moved.data), tmp_path / "run") == evaluated
    for form in (None, "{}.0", "other {}"):
        with pytest.raises(ConfigError, match=r"of other classes: its (labels are numbers|class .* is none of the 6)"):
            jaxdp.evaluate(dataclasses.replace(config, data=six("other", form=form)), tmp_path / "run")

    results = {}
    for name, continued in (("same", longer), ("moved", moved)):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        results[name] = jaxdp.train(continued, tmp_path / name, accept_changes=True)
    from_other = jaxdp.train(moved, tmp_path / "from", resume=tmp_path / "run", accept_changes=True)
    for result in (results["moved"], from_other):
        assert (result.loss, result.accuracy) == (results["same"].loss, results["same"].accuracy)
    for name in ("moved", "from"):
        assert (tmp_path / name / "classes.json").read_text() == (tmp_path / "run/classes.json").read_text()


def test_a_run_on_numbers_refuses_names(tiny, six, tmp_path):
    config = dataclasses.replace(tiny, data=six("numbers", form=None), batch=tiny.batch[-1:], epochs=1.5)
    jaxdp.train(config, tmp_path / "run")
    assert (tmp_path / "run/classes.json").read_text() == "[]\n"
    named = dataclasses.replace(config, data=six("names"))
    for use in (jaxdp.evaluate, lambda config, run: jaxdp.train(config, run, accept_changes=True)):
        with pytest.raises(ConfigError, match="its class 'n0' is a name, but labels were numbers in training"):
            use(named, tmp_path / "run")
    digits = dataclasses.replace(config, data=six("digits", (3, 0, 5, 1, 4, 2), form="{}"))
    assert jaxdp.evaluate(digits, tmp_path / "run") == jaxdp.evaluate(config, tmp_path / "run")
