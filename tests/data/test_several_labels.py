"""Several labels for each image from every kind of data, names of classes beside arrays, and wrong labels."""

import numpy as np
import pytest
from PIL import Image

import jaxdp
from jaxdp.config import Data, Model, Optimizer
from jaxdp.data.batch_sources import DataError
from jaxdp.data.sources import open_datasets
from jaxdp.errors import ConfigError

PIXELS = np.full((4, 16, 16, 3), 9, np.uint8)
LABELS = np.array([[1, 0], [0, 1], [0, 0], [1, 1]])
COLUMNS, SEPARATED = {"label_column": ("cat", "dog")}, {"label_separator": ";"}


def opened(path=None, datasets=None, task="labels", **data):
    """The data sets of a file, or of `datasets`."""
    source = {"source": "given"} if path is None else {"source": "file", "directory": str(path)}
    optimizer = Optimizer(loss="binary") if task == "labels" else Optimizer()
    config = jaxdp.Config(task=task, data=Data(image_size=16, **source, **data), model=Model(), optimizer=optimizer)
    return open_datasets(config, datasets)


@pytest.fixture
def images(tmp_path):
    """The folder of four images, NUMBER.png."""
    for number, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return tmp_path


@pytest.fixture
def table(images):
    """table(header of the labels, values): a CSV of three training images and an evaluation image."""

    def write(header, values):
        rows = [f"{row}.png,{value},{'train' if row < 3 else 'val'}" for row, value in enumerate(values)]
        (images / "table.csv").write_text("\n".join([f"path,{header},split", *rows]))
        return images / "table.csv"

    return write


@pytest.fixture
def parquet(images):
    """parquet(columns): the same as Parquet."""
    package = pytest.importorskip("pyarrow.parquet", reason="needs the extra hf")

    def write(**columns):
        rows = {"path": [f"{row}.png" for row in range(4)], "split": ["train"] * 3 + ["val"], **columns}
        package.write_table(pytest.importorskip("pyarrow").table(rows), images / "table.parquet")
        return images / "table.parquet"

    return write


def found(datasets):
    return datasets.classes, datasets.train.labels.tolist(), datasets.evaluation.labels.tolist()


def test_tables_have_labels_in_columns_or_with_a_separator(table, parquet):
    expected = (("cat", "dog"), [[1, 0], [0, 1], [0, 0]], [[1, 1]])
    assert found(opened(table("cat,dog", ["1,0", "False,true", "0,0.0", "1.0,TRUE"]), **COLUMNS)) == expected
    assert found(opened(table("label", ["cat", "dog;dog", "", "cat; dog"]), **SEPARATED)) == expected
    assert found(opened(parquet(cat=[1.0, 0.0, 0.0, 1.0], dog=[False, True, False, True]), **COLUMNS)) == expected
    assert found(opened(parquet(label=["cat", "dog", None, "dog;cat"]), **SEPARATED)) == expected
    assert found(opened(parquet(label=[0, 1, None, 0]), **SEPARATED))[:2] == (("0", "1"), expected[1])


@pytest.mark.parametrize(
    ("header", "values", "data", "message"),
    [
        *(
            ("cat,dog", ["1,0", f"1,{value}"], COLUMNS, f"row 3 has '{value}' in the column 'dog'; .* 0 or 1")
            for value in ("nan", "2", "0.5", "", "yes")
        ),
        ("cat,dog", ["1,0", "1"], COLUMNS, "row 3 has 3 values"),
        ("cat", ["1", "0"], COLUMNS, "it has no column dog; .* its columns are path, cat, split"),
        ("cat,dog", ["1,0"] * 4, {"label_column": ("dog", "dog")}, r"data\.label_column=.* names a column twice"),
        ("cat,dog", ["1,0"] * 4, COLUMNS | SEPARATED, r"data\.label_separator=';': is a text between the names in one column"),
        ("label", ["a;b"] * 4, {"label_separator": ""}, r"data\.label_separator='': is a text"),
        ("label", ["a;b", "a;b", "a;b", "a;c"], SEPARATED, "row 5 has the label 'c'; the training split lacks it"),
        ("label", ["a;b", "nan", "a", "b"], SEPARATED, "row 3 has the label 'nan'; labels are names separated by ';'"),
        ("label", ["a", "b", "a", "b"], {}, r"task='labels': the training set has one label for each image, \(3,\)"),
    ],
)
def test_wrong_labels_of_a_table_are_named_in_one_line(table, header, values, data, message):
    with pytest.raises(ConfigError, match=message):
        opened(table(header, values), **data)


@pytest.mark.parametrize("value", [0.5, float("nan"), None])
def test_wrong_labels_of_parquet_are_named_in_one_line(parquet, value):
    with pytest.raises(ConfigError, match=f"row 2 has {value} in the column 'dog'"):
        opened(parquet(cat=[1, 0, 0, 1], dog=[0, value, 1, 0]), **COLUMNS)
    if value is not None:
        with pytest.raises(ConfigError, match=f"row 2 has the label {value}; labels are names separated by"):
            opened(parquet(label=[0, value, 1, 0]), **SEPARATED)
        with pytest.raises(ConfigError, match=f"row 2 has the label {value}; labels are names, or whole numbers"):
            opened(parquet(label=[0, value, 1, 0]), task="classes")


def wrong(value):
    labels = LABELS.astype(float)
    labels[2, 1] = value
    return labels


@pytest.mark.parametrize(
    ("training", "evaluation", "message"),
    [
        *(
            (LABELS, wrong(value), rf"row 2 of (val|evaluation) has the label {value} for class 1; .* each 0 or 1")
            for value in (np.nan, 0.5, 2.0, -1.0)
        ),
        (LABELS, np.eye(4)[:, :3], "the evaluation set is of other classes: it has 3 labels, and the training set 2"),
        (LABELS[..., None], LABELS, r"labels are int64 of shape \(4, 2, 1\); give whole numbers of shape \(4,\)"),
        (LABELS[:3], LABELS, r"labels are int64 of shape \(3, 2\)"),
        (LABELS[:, 0], LABELS[:, 0], r"task='labels': the training set has one label for each image, \(4,\)"),
    ],
)
def test_wrong_labels_of_arrays_and_npz_are_named_in_one_line(tmp_path, training, evaluation, message):
    with pytest.raises(ConfigError, match=message):
        opened(datasets=((PIXELS, training), (PIXELS, evaluation)))
    np.savez(tmp_path / "set", train_images=PIXELS, train_labels=training, val_images=PIXELS, val_labels=evaluation)
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / "set.npz")


class Items(list):
    classes = 2


@pytest.mark.parametrize("label", [[1, np.nan], [1, 0, 1], 1, "a", ["a", "b"], [0.5, 1], None, [[1], [0]]])
def test_wrong_labels_of_items_are_named_in_one_line(label):
    good = [(PIXELS[0], LABELS[0])] * 2
    label = np.array(label) if isinstance(label, list) else label
    with pytest.raises(DataError, match=r"^training image 2: the label "):
        opened(datasets=(Items([*good, (PIXELS[0], label)]), Items(good)))
    assert opened(datasets=(Items([*good, (PIXELS[0], [True, False])]), Items(good))).train.labels.tolist() == [[1, 0]] * 3


@pytest.mark.parametrize(
    ("task", "labels", "names", "message"),
    [
        ("labels", LABELS, ["a", "b", "c"], "training has 2 labels for each image and 3 class names"),
        ("classes", LABELS[:, 0], ["a"], "row 0 of training has the label 1; there are 1 class names, from 0"),
        ("labels", LABELS, ["caf\u00e9", "cafe\u0301"], "training names two classes 'caf\u00e9'"),
        ("labels", LABELS, np.ones(4), r"training names two classes '1\.0'"),
    ],
)
def test_wrong_names_beside_arrays_are_refused(task, labels, names, message):
    with pytest.raises(ConfigError, match=f"^datasets: {message}"):
        opened(datasets=((PIXELS, labels, names), (PIXELS, labels)), task=task)


@pytest.mark.parametrize(("task", "labels"), [("labels", LABELS), ("classes", LABELS[:, 0])])
def test_names_beside_arrays_name_the_classes_of_both_sets(tmp_path, task, labels):
    names = np.array(["cat", "dog"])
    for training, evaluation in (((names,), ()), ((), (names,)), ((names,), (["cat", "dog"],))):
        datasets = opened(datasets=((PIXELS, labels, *training), (PIXELS, labels, *evaluation)), task=task)
        assert (datasets.classes, datasets.class_count) == (("cat", "dog"), 2)
    assert opened(datasets=((PIXELS, labels, None), (PIXELS, labels)), task=task).classes == ()
    arrays = {
        f"{split}_{name}": array for split in ("train", "val") for name, array in (("images", PIXELS), ("labels", labels))
    }
    np.savez(tmp_path / "set", **arrays, class_names=names)
    assert opened(tmp_path / "set.npz", task=task).classes == ("cat", "dog")


def test_names_in_another_order_are_matched_for_classes_and_refused_for_labels():
    names = ["a", "b"], ["b", "a"]
    datasets = opened(datasets=[(PIXELS, LABELS[:, 0], each) for each in names], task="classes")
    assert datasets.evaluation.labels.tolist() == [0, 1, 1, 0]
    with pytest.raises(ConfigError, match="the names of its labels have another order than in training"):
        opened(datasets=[(PIXELS, LABELS, each) for each in names])


@pytest.fixture
def saved(images):
    """saved(kind, label of the second training image, and of evaluation): a data set of Hugging Face, and its options."""
    package = pytest.importorskip("datasets", reason="needs the extra hf")
    package.disable_progress_bars()
    options = {"classes": {}, "classes;": SEPARATED, "columns": COLUMNS, "text": SEPARATED}

    def save(kind, training, evaluation):
        features = {"label": package.Sequence(package.ClassLabel(names=["cat", "dog"]))}
        if kind in ("columns", "text"):
            names = ("cat", "dog") if kind == "columns" else ("label",)
            features = dict.fromkeys(names, package.Value("float32" if kind == "columns" else "string"))
        splits = {}
        for split, second in (("train", training), ("validation", evaluation)):
            columns = {"label": ["cat", second, ""] if kind == "text" else [[0], second, []]}
            columns = {"cat": [1.0, 0.0, 0.0], "dog": [0.0, second, 0.0]} if kind == "columns" else columns
            rows = {"image": [str(images / f"{row}.png") for row in range(3)]} | columns
            splits[split] = package.Dataset.from_dict(rows, features=package.Features(image=package.Image(), **features))
        package.DatasetDict(splits).save_to_disk(str(images / "saved"))
        return images / "saved", options[kind]

    return save


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("classes", [0, None], "row 1 of train has the label None; give it one of the 2 classes"),
        ("classes", [-1], "row 1 of train has the label -1; give it one of the 2 classes"),
        ("classes;", [1], r"row 0 of train has the label \[0\]; labels are names separated by ';'"),
        ("columns", 0.5, "row 1 of train has 0.5 in the column 'dog'"),
        ("columns", None, "row 1 of train has None in the column 'dog'"),
    ],
)
def test_wrong_labels_of_hugging_face_are_named_in_one_line(saved, kind, value, message):
    place, options = saved(kind, value, value)
    with pytest.raises(ConfigError, match=message):
        opened(place, **options)


@pytest.mark.parametrize(("kind", "value"), [("classes", [1]), ("columns", 1.0), ("text", "dog")])
def test_hugging_face_has_labels_in_sequences_columns_or_a_text(saved, kind, value):
    place, options = saved(kind, value, value)
    assert found(opened(place, **options)) == (("cat", "dog"), *[[[1, 0], [0, 1], [0, 0]]] * 2)


def test_a_label_of_hugging_face_that_training_lacks_is_named(saved):
    place, options = saved("text", "dog", "dog;cow")
    with pytest.raises(ConfigError, match="row 1 of validation has the label 'cow'; the training split lacks it"):
        opened(place, **options)
