"""The data source `file`: tables, arrays, CIFAR and data sets of Hugging Face hold the images that others wrote there."""

import codecs
import csv
import dataclasses
import datetime
import os
import pickle
import pickletools
import re
import shutil

import numpy as np
import pytest
from helpers.images import smooth_image
from PIL import Image

import jaxdp
from jaxdp.config import Config, Data
from jaxdp.data import file_format, sources, table
from jaxdp.data.datasets import with_classes
from jaxdp.data.decode import ImageError, decode
from jaxdp.data.from_python import as_source
from jaxdp.data.hugging_face import HuggingFace
from jaxdp.errors import ConfigError

LABELS = [2, 0, 1, 0]
NAMES = ["ape", "bee", "cat"]


def config_of(path, **data) -> Config:
    return Config(data=Data(source="file", directory=str(path), image_size=32, **data))


def splits(path, **data):
    config = config_of(path, **data)
    return dict(sources.source_of(config).splits(config))


def pixels(items):
    return [
        decode(image) if isinstance(image, bytes) else np.asarray(image)
        for image, _ in map(items.__getitem__, range(len(items)))
    ]


def labels(items):
    return [items[index][1] for index in range(len(items))]


@pytest.fixture
def images(tmp_path):
    """Four PNGs, gray, with a palette, with transparency and RGB, in tmp_path/images; their RGB pixels as Pillow has them."""
    (tmp_path / "images").mkdir()
    expected = []
    for number, mode in enumerate(("L", "P", "RGBA", "RGB")):
        image = Image.fromarray(smooth_image(20 + number, 24, seed=number)).convert(mode)
        image.save(tmp_path / f"images/{number}.png")
        expected.append(np.asarray(Image.open(tmp_path / f"images/{number}.png").convert("RGB")))
    return expected


def write_table(path, header, rows, delimiter=","):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])


@pytest.mark.parametrize(("suffix", "divided"), [("CSV", False), ("tsv", True), ("Parquet", False), ("parquet", True)])
def test_tables_have_the_images_and_class_names_of_their_rows(tmp_path, images, suffix, divided):
    rows = {split: [(f"images/{n}.png", NAMES[label]) for n, label in enumerate(LABELS)] for split in ("train", "val")}

    def write(path, header, lines):
        if suffix.lower() == "parquet":
            parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
            columns = dict(zip(header, map(list, zip(*lines, strict=True)), strict=True))
            parquet.write_table(pyarrow.table(columns), path)
        else:
            write_table(path, header, lines, "\t" if suffix == "tsv" else ",")

    if divided:
        for split, lines in rows.items():
            write(tmp_path / f"{split}.{suffix}", ["path", "label"], lines)
    else:
        write(tmp_path / f"all.{suffix}", ["split", "path", "label"], [(s, *line) for s in rows for line in rows[s]])
    for items in splits(tmp_path if divided else tmp_path / f"all.{suffix}").values():
        assert labels(items) == LABELS
        assert items.classes == NAMES
        for found, expected in zip(pixels(items), images, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_numbers_are_labels_from_0_with_gaps_and_other_columns_are_named(tmp_path, images):
    for split, numbers in (("train", (4, 0, 1, 0)), ("val", (4, 2, 1, 0))):
        write_table(
            tmp_path / f"{split}.csv", ["label", "id", "breed"], [("x", f"images/{n}.png", v) for n, v in enumerate(numbers)]
        )
    opened = sources.open_datasets(config_of(tmp_path, image_column="id", label_column=("breed",)))
    assert (opened.class_count, opened.classes) == (5, ())
    assert opened.train.labels.tolist() == [4, 0, 1, 0]
    assert opened.warnings == (
        "no training image has the label 2, and labels count from 0",
        "the evaluation set has the label 2, which no training image has",
    )


HEADER = "path,label\n"
GOOD = "images/0.png,ape\nimages/1.png,bee\n"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (HEADER, "it has no rows"),
        (GOOD, r"its first line does not name the columns, but is images/0\.png, ape; add path,label or the like in front"),
        ("file path,label\na,b\n", r"no column image or .*--data\.image-column; its columns are file path, label"),
        (
            "path;label\na;b\n",
            r"with the separator ',' it has only the column 'path;label'; separate the columns by commas in \.csv",
        ),
        ("path,file,label\na,b,c\n", r"several columns .*--data\.image-column"),
        (HEADER + GOOD + "images/0.png,bee\n", r"row 2 and row 4 give 'images/0\.png' different labels"),
        (HEADER + "images/0.png\n", "row 2 has 1 value, the first row 2"),
        (HEADER + "\n\nimages/0.png,\n", "row 4 has no label"),
        (HEADER + ",ape\n", "row 2 has no path"),
        (HEADER + 'images/0.png,"ape\n', "row 2: unexpected end of data"),
        (HEADER + "images/1.png,0\nimages/0.png,-1\n", "row 3 has the label '-1'; labels are names, or whole numbers from 0"),
        (HEADER + "images/1.png,0\nimages/0.png,1000000\n", "row 3 has the label '1000000'; .* from 0 to 999,999"),
        (HEADER + "images/1.png,0\nimages/0.png,1.5\n", "row 3 has the label '1.5'"),
        (HEADER + "images/1.png,0\nimages/0.png,NaN\n", "row 3 has the label 'NaN'"),
        (HEADER + "images/1.png,ape\nimages/0.png,nan\n", "row 3 has the label 'nan'; labels are names"),
        ((HEADER + "images/0.png,\xe9t\xe9\n").encode("latin-1"), "not UTF-8"),
    ],
)
def test_an_unusable_table_is_refused_with_its_row(tmp_path, images, table, message):
    for split in ("train", "val"):
        (tmp_path / f"{split}.csv").write_bytes(table if isinstance(table, bytes) else table.encode())
    with pytest.raises(ConfigError, match=message):
        sources.open_datasets(config_of(tmp_path))


def test_a_table_of_a_spreadsheet_is_read_as_a_clean_one(tmp_path, images):
    """With a byte order mark, spaces, quotes, empty lines, capitals and Windows' line ends; hidden files are no splits."""
    (tmp_path / "images/a,b.png").write_bytes((tmp_path / "images/1.png").read_bytes())
    rows = ["\ufeff Path , Label", "images/0.png, ape ", "", '"images/a,b.png", "bee"', 'images/2.png,"ape"', ""]
    for split in ("train", "val"):
        (tmp_path / f"{split}.CSV").write_bytes("\r\n".join(rows).encode())
        (tmp_path / f".{split}.csv").write_text("no table")
    for items in splits(tmp_path).values():
        assert (labels(items), items.classes) == ([0, 1, 0], ["ape", "bee"])
        for found, expected in zip(pixels(items), images, strict=False):
            np.testing.assert_array_equal(found, expected)
        assert items.name(1).endswith("images/a,b.png (row 4 of train.CSV)".replace("train", items.table.path.stem))


@pytest.mark.parametrize(("missing", "is_found"), [(0, True), (1, False), (3, True), (5, False), (6, True)])
def test_the_files_of_evenly_spaced_rows_must_exist_at_the_start_and_others_when_they_are_read(
    tmp_path, monkeypatch, missing, is_found
):
    monkeypatch.setattr(table, "CHECKED", 3)
    for split in ("train", "val"):
        write_table(tmp_path / f"{split}.csv", ["path", "label"], [(f"{n}.png", n) for n in range(7)])
    for number in {*range(7)} - {missing}:
        (tmp_path / f"{number}.png").touch()
    items = splits(tmp_path)["train"]
    if is_found:
        with pytest.raises(ConfigError, match=rf"row {missing + 2}: no file '.*/{missing}\.png'; fix the path"):
            items.start()
    else:
        items.start()
    with pytest.raises(ImageError, match="No such file"):
        items[missing]


def test_a_path_that_no_file_can_have_is_an_unusable_image(tmp_path):
    for split in ("train", "val"):
        write_parquet(tmp_path / f"{split}.parquet", [0, 1], ["a\0b.png", f"{'c' * 300}.png"])
    items = splits(tmp_path)["train"]
    for index, reason in ((0, "null (byte|character)"), (1, "File name too long")):
        with pytest.raises(ImageError, match=reason):
            items[index]
    assert items.name(0) == f"{tmp_path}/a\\x00b.png (row 1 of train.parquet)"
    with pytest.raises(ConfigError, match=r"row 1: no file"):
        items.start()


def test_as_many_names_as_classes_can_be_are_accepted(tmp_path, images, monkeypatch):
    monkeypatch.setattr(file_format, "MAX_CLASSES", 3)
    for split, numbers in (("train", range(3)), ("val", range(3))):
        write_table(tmp_path / f"{split}.csv", ["path", "label"], [(f"images/{n}.png", NAMES[n]) for n in numbers])
    assert splits(tmp_path)["train"].classes == NAMES
    write_table(tmp_path / "train.csv", ["path", "label"], [(f"images/{n}.png", f"n{n}") for n in range(4)])
    with pytest.raises(ConfigError, match=r"the data set has more than 3 classes; name the column of the labels with"):
        splits(tmp_path)


def test_a_repeated_row_is_warned_about_and_classes_must_be_those_of_training(tmp_path, images):
    (tmp_path / "train.csv").write_text(HEADER + GOOD + "images/0.png,ape\n")
    (tmp_path / "val.csv").write_text(HEADER + "images/1.png,bee\n")
    train, evaluation = splits(tmp_path).values()
    assert train.warnings == ["train.csv names an image again in 1 row; it counts each time"]
    assert (labels(evaluation), evaluation.classes) == ([1], ["ape", "bee"])
    (tmp_path / "images/0.png").unlink()
    assert len(sources.open_datasets(config_of(tmp_path), may_lack_classes=True).evaluation) == 1  # needs no training images
    with pytest.raises(ConfigError, match=r"train\.csv': row 2: no file '.*images/0\.png'"):
        sources.open_datasets(config_of(tmp_path))
    (tmp_path / "val.csv").write_text(HEADER + "images/1.png,eel\n")
    with pytest.raises(ConfigError, match=r"val\.csv': row 2 has the label 'eel'; the training split lacks it"):
        splits(tmp_path)
    (tmp_path / "train.csv").write_text(HEADER + "images/0.png,0\nimages/1.png,1\n")
    with pytest.raises(ConfigError, match=r"the labels of train are numbers, the labels of val names"):
        splits(tmp_path)


def write_parquet(path, values, paths=None):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = paths or [f"images/{n}.png" for n in range(len(values))]
    parquet.write_table(pyarrow.table({"path": paths, "label": values}), path)


@pytest.mark.parametrize("form", ["csv", "parquet", "npz"])
def test_whole_floats_are_the_numbers_of_classes(tmp_path, images, form):
    """What pandas makes of integers after a missing value."""
    values = np.array([10.0, 2.0, 0.0, 1.0])
    for split in ("train", "val"):
        if form == "csv":
            write_table(tmp_path / f"{split}.csv", ["path", "label"], [(f"images/{n}.png", v) for n, v in enumerate(values)])
        elif form == "parquet":
            write_parquet(tmp_path / f"{split}.parquet", values)
        elif form == "npz":
            np.savez(tmp_path / f"{split}.npz", images=np.zeros((4, 8, 8), np.uint8), labels=values)
    for items in splits(tmp_path).values():
        assert (labels(items), items.classes) == (values.tolist(), 11)
        assert items.labels.dtype.kind == "i"


@pytest.mark.parametrize("kind", ["int8", "uint64", "float16", "float32", "double", "decimal", "category", "bool"])
def test_parquet_labels_of_every_type_of_numbers_are_equal(tmp_path, kind):
    """As pyarrow converts them; booleans are the names of two classes."""
    pyarrow = pytest.importorskip("pyarrow")
    values = pyarrow.array([True, False, True] if kind == "bool" else [1, 0, 10])
    if kind == "category":
        values = values.cast("string").dictionary_encode()
    elif kind != "bool":
        values = pyarrow.array(np.array([1, 0, 10], np.float16)) if kind == "float16" else values
        values = values.cast(pyarrow.decimal128(21, 1) if kind == "decimal" else kind)
    for split in ("train", "val"):
        write_parquet(tmp_path / f"{split}.parquet", values)
    for items in splits(tmp_path).values():
        found = (items.labels.tolist(), items.classes)
        assert found == (([1, 0, 1], ["False", "True"]) if kind == "bool" else ([1, 0, 10], 11))


NOT_LABELS = [
    ([0.0, np.nan, 1.0], 1),
    ([0.0, 1.5, 1.0], 1),
    ([0.0, np.inf, 1.0], 1),
    ([0.0, -1.0, 1.0], 1),
    ([0, 1, -1], 2),
    ([0, 1, 10**6], 2),
    (["0", "1", "10000000000"], 2),
    (["ape", "nan", "bee"], 1),
    (["0", "inf", "1"], 1),
    (["0", "1", "-inf"], 2),
    ([[0, 1], [1, 0]], 0),
    ([{"a": 0}, {"a": 1}], 0),
    ([b"ape", b"bee"], 0),
    ([datetime.date(2026, 1, 1)] * 2, 0),
]


@pytest.mark.parametrize(("values", "row"), NOT_LABELS, ids=str)
@pytest.mark.parametrize("form", ["parquet", "npz", "python"])
def test_a_value_that_is_no_name_and_no_number_of_a_class_is_refused_with_its_row(tmp_path, images, form, values, row):
    arrays = {"images": np.zeros((len(values), 8, 8), np.uint8), "labels": np.array(values)}
    if form in ("npz", "python") and (arrays["labels"].dtype.kind not in "if" or arrays["labels"].ndim > 1):
        return  # the type and shape of the array are refused
    shown = re.escape(repr(values[row]))
    if form == "parquet":
        write_parquet(tmp_path / "train.parquet", values)
    elif form == "npz":
        np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(
        ConfigError, match=rf"row {row + (form == 'parquet')} (of train\w* )?has the label {shown}; labels are "
    ):
        as_source(tuple(arrays.values()), "training") if form == "python" else splits(tmp_path)


def test_names_in_another_unicode_form_are_one_class_of_a_table_and_refused_as_given_names(tmp_path, images):
    composed, decomposed = "caf\xe9", "cafe\u0301"
    for split, forms in (("train", (composed, decomposed)), ("val", (decomposed, decomposed))):
        rows = [(f"images/{n}.png", name) for n, name in enumerate((*forms, "ape"))]
        write_table(tmp_path / f"{split}.csv", ["path", "label"], rows)
    for items in splits(tmp_path).values():
        assert (labels(items), items.classes) == ([1, 1, 0], ["ape", composed])
    arrays = {"images": np.zeros((2, 8, 8), np.uint8), "labels": [0, 1], "class_names": [composed, decomposed]}
    for split in ("train", "val"):
        (tmp_path / "npz").mkdir(exist_ok=True)
        np.savez(tmp_path / f"npz/{split}.npz", **arrays)
    named = type("Named", (list,), {"class_names": [composed, decomposed]})([(arrays["images"][0], 0)])
    given = Config(data=Data(source="given", image_size=32))
    for use in (sources.open_datasets, sources.inspect, lambda _: sources.open_datasets(given, (named, named))):
        with pytest.raises(ConfigError, match=r"differ only in their Unicode form, 'caf\\xe9' and 'cafe\\u0301'"):
            use(config_of(tmp_path / "npz"))


BYTES_AND_PATH = {"bytes": "binary", "path": "string"}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (BYTES_AND_PATH, lambda path, content: {"bytes": content, "path": "elsewhere.png"}),
        (BYTES_AND_PATH, lambda path, content: {"bytes": None, "path": path}),
        ({"path": "string", "bytes": "null"}, lambda path, content: {"bytes": None, "path": path}),
        ({"bytes": "large_binary"}, lambda path, content: {"bytes": content}),
        ("binary", lambda path, content: content),
        ("large_binary", lambda path, content: content),
        ("binary_view", lambda path, content: path.encode()),
        ("binary", lambda path, content: path.encode()),
        ("large_string", lambda path, content: path),
        ("categories", lambda path, content: path),
        ("categories", lambda path, content: path.encode()),
        ("categories", lambda path, content: content),
    ],
)
def test_parquet_has_images_or_paths_as_pandas_and_hugging_face_write_them(tmp_path, images, kind, value):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = [f"images/{n}.png" for n in range(4)]
    values = [value(path, (tmp_path / path).read_bytes()) for path in paths]
    if kind == "categories":
        column = pyarrow.array(values).dictionary_encode()
    else:
        fields = kind if isinstance(kind, str) else list(kind.items())
        types = {
            name: getattr(pyarrow, name) for name in ("binary", "large_binary", "binary_view", "string", "large_string", "null")
        }
        column_type = (
            types[fields]() if isinstance(fields, str) else pyarrow.struct([(name, types[of]()) for name, of in fields])
        )
        column = pyarrow.array(values, column_type)
    parquet.write_table(
        pyarrow.table({"split": ["train", "val"] * 2, "image": column, "label": LABELS}), tmp_path / "all.parquet"
    )
    train, evaluation = splits(tmp_path / "all.parquet").values()
    for items, rows in ((train, (0, 2)), (evaluation, (1, 3))):
        assert labels(items) == [LABELS[row] for row in rows]
        for found, row in zip(pixels(items), rows, strict=True):
            np.testing.assert_array_equal(found, images[row])
    assert train.name(1).endswith("row 3 of all.parquet" + ")" * train.name(1).startswith(str(tmp_path)))


def write_shards(folder, suffix, shards):
    """Files of (path, name of the class) in rows, or of gray images in place of the paths."""
    for name, rows in shards.items():
        if suffix == "npz":
            arrays = {"images": np.array([np.full((8, 8), int(path[7])) for path, _ in rows], np.uint8)}
            numbers = [NAMES.index(label) for _, label in rows]
            np.savez(folder / f"{name}.npz", **arrays, labels=numbers, class_names=NAMES)
        elif suffix == "csv":
            write_table(folder / f"{name}.csv", ["path", "label"], rows)
        else:
            parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
            columns = dict(zip(("path", "label"), map(list, zip(*rows, strict=True)), strict=True))
            parquet.write_table(pyarrow.table(columns), folder / f"{name}.{suffix}")


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz"])
@pytest.mark.parametrize("names", ["train-{:05}-of-00003", "train-{:05}-of-00003-0a1b2c3d4e5f6071", "train-{}-of-3"])
def test_shards_are_one_split_with_the_classes_of_all_and_a_missing_one_is_named(tmp_path, images, suffix, names):
    rows = [(f"images/{n}.png", NAMES[label]) for n, label in enumerate(LABELS)]
    parts = [rows[:2], rows[2:3], rows[3:]]  # cat and ape, bee, ape
    first = 1 if names == "train-{}-of-3" else 0
    files = [names.format(number + first) for number in range(3)]
    write_shards(tmp_path, suffix, dict(zip(files, parts, strict=True)) | {"test-00000-of-00001": rows})
    train, evaluation = splits(tmp_path).values()
    assert (labels(train), train.classes) == (labels(evaluation), evaluation.classes) == (LABELS, NAMES)
    for one, other in zip(pixels(train), pixels(evaluation), strict=True):
        np.testing.assert_array_equal(one, other)
    if suffix != "npz":
        assert train.name(2).endswith(f"images/2.png (row {2 if suffix == 'csv' else 1} of {files[1]}.{suffix})")
    with pytest.raises(ConfigError, match=rf"{files[1]}\.{suffix}': it is one shard of several; give the folder {tmp_path}"):
        splits(tmp_path / f"{files[1]}.{suffix}")
    (tmp_path / f"{files[1]}.{suffix}").rename(tmp_path / "other")
    with pytest.raises(ConfigError, match=rf"it lacks train-0000{1 + first}-of-00003\.{suffix}; "):
        splits(tmp_path)
    (tmp_path / "other").rename(tmp_path / f"train-00000-of-00002.{suffix}")
    with pytest.raises(ConfigError, match=r"it has both train-.*-of-.* and train-.*-of-"):
        splits(tmp_path)


def test_errors_of_shards_name_the_shard(tmp_path, images):
    write_shards(tmp_path, "csv", {f"train-{n}-of-2": [(f"images/{n}.png", "ape" * n)] for n in range(2)})
    with pytest.raises(ConfigError, match=rf"{tmp_path}': row 2 of train-0-of-2\.csv has no label"):
        splits(tmp_path)
    write_shards(tmp_path, "csv", {f"train-{n}-of-2": [("images/0.png", NAMES[n])] for n in range(2)})
    with pytest.raises(
        ConfigError, match=r"row 2 of train-0-of-2\.csv and row 2 of train-1-of-2\.csv give 'images/0\.png' diff"
    ):
        splits(tmp_path)
    for file in tmp_path.glob("*.csv"):
        file.unlink()
    (tmp_path / "repository/data").mkdir(parents=True)
    write_shards(tmp_path / "repository/data", "npz", {f"train-{n}-of-2": [("images/0.png", "ape")] for n in range(2)})
    with pytest.raises(ConfigError, match=r"use --data\.directory .*repository/data"):
        splits(tmp_path / "repository")
    second = tmp_path / "repository/data/train-1-of-2.npz"
    for change, message in (
        (
            {"images": np.zeros((1, 9, 9), np.uint8)},
            r"its images are uint8 of shape \(1, 9, 9\), but in train-0-of-2\.npz uint8",
        ),
        ({"labels": np.zeros((1, 1), int)}, r"its labels are int64 of shape \(1, 1\), but in"),
        ({"class_names": NAMES[::-1]}, r"its class_names are not the ones in train-0-of-2\.npz"),
    ):
        np.savez(second, **{"images": np.zeros((1, 8, 8), np.uint8), "labels": [0], "class_names": NAMES} | change)
        with pytest.raises(ConfigError, match=rf"train-1-of-2\.npz': {message}"):
            splits(second.parent)


def test_tables_that_are_too_large_for_the_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    write_shards(tmp_path, "csv", {f"train-{n}-of-2": [(f"images/{n}.png", "ape")] for n in range(2)})
    size = sum(file.stat().st_size for file in tmp_path.glob("*.csv"))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2 * size - 1, "SC_PAGE_SIZE": 1}.get)
    with pytest.raises(ConfigError, match=r"tables are read into memory, and these take 0.0 GiB; the machine has 0.0"):
        splits(tmp_path)
    shutil.copy(tmp_path / "train-0-of-2.csv", tmp_path / "val.csv")
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2 * size, "SC_PAGE_SIZE": 1}.get)
    assert len(splits(tmp_path)["train"]) == 2


def test_a_parquet_file_that_is_damaged_or_has_columns_of_another_type_is_refused(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"train\.parquet': damaged or not a Parquet file: "):
        splits(tmp_path)
    for value, kind in (
        (5, "int64"),
        (["a.png"], "list<.*>"),
        ({"data": b"a"}, "struct<data: binary>"),
        ({"bytes": 1}, "struct<b.*>"),
    ):
        parquet.write_table(pyarrow.table({"image": [value], "label": [0]}), tmp_path / "train.parquet")
        with pytest.raises(ConfigError, match=rf"the column 'image' has the type {kind}, not text or bytes; store paths"):
            splits(tmp_path)
    for empty in (None, b"", {"bytes": None, "path": None}):
        value = {"bytes": b"a", "path": "a"} if isinstance(empty, dict) else b"a.png"
        parquet.write_table(pyarrow.table({"image": [value, empty], "label": [0, 1]}), tmp_path / "train.parquet")
        with pytest.raises(ConfigError, match=r"row 2 has no image; add it, or remove the row"):
            splits(tmp_path)


@pytest.mark.parametrize("keys", [("{}_images", "{}_labels"), ("x_{}", "y_{}"), None])
def test_npz_files_have_their_arrays(tmp_path, keys):
    generator = np.random.default_rng(0)
    arrays = {split: generator.integers(0, 256, (4, 8, 8), np.uint8) for split in ("train", "test")}
    if keys:
        stored = {keys[0].format(split): images for split, images in arrays.items()}
        stored |= {keys[1].format(split): np.array(LABELS)[:, None] for split in arrays}
        np.savez(tmp_path / "all.npz", **stored, class_names=NAMES)
    else:
        for split, images in arrays.items():
            np.savez_compressed(tmp_path / f"{split}.npz", images=images, labels=LABELS, class_names=NAMES)
    for split, items in splits(tmp_path / "all.npz" if keys else tmp_path).items():
        assert (labels(items), items.classes) == (LABELS, NAMES)
        np.testing.assert_array_equal(pixels(items), arrays[split])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"a": np.zeros(1), "b": np.zeros(1)},
            "no SPLIT_images and SPLIT_labels, or x_SPLIT and .* among its arrays a, b; rename",
        ),
        (
            {"x_test": np.zeros((2, 8, 8), np.uint8), "y_test": np.zeros(2, int), "x_train": 0},
            "has no split 'train'; its arrays are x_test, y_test, x_train",
        ),
        (
            {"images": np.zeros((2, 8, 8), np.uint8), "labels": np.zeros(2, int)},
            r"among its arrays images, labels; give the folder of all\.npz",
        ),
        ({"x_train": np.zeros((2, 8, 8)), "y_train": np.zeros(2, int)}, r"train images are float64 of shape \(2, 8, 8\)"),
        ({"x_train": np.zeros((2, 8, 8), np.uint8), "y_train": np.array([0, None])}, "with pickled objects"),
        ({"x_train": np.zeros((2, 8, 8), np.uint8), "y_train": np.array([0, -1])}, "row 1 of train has the label -1"),
        (
            {"x_train": np.zeros((2, 8, 8), np.uint8), "y_train": np.array([0, 3]), "class_names": NAMES},
            "row 1 of train has the label 3; there are 3 class names, from 0",
        ),
    ],
)
def test_unusable_arrays_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "all.npz", **arrays)
    with pytest.raises(ConfigError, match=message):
        splits(tmp_path / "all.npz")
    (tmp_path / "all.npz").write_bytes((tmp_path / "all.npz").read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"damaged, not an \.npz file, or with pickled objects: "):
        splits(tmp_path / "all.npz")


@pytest.mark.parametrize("reverse", [False, True])
def test_an_npz_with_two_pairs_of_arrays_for_a_split_is_refused_and_names_both(tmp_path, reverse):
    images, labels = np.zeros((2, 8, 8), np.uint8), np.array([0, 1])
    arrays = {"x_train": images, "y_train": labels, "train_images": images + 1, "train_labels": labels}
    np.savez(tmp_path / "two.npz", **dict(sorted(arrays.items(), reverse=reverse)))
    with pytest.raises(ConfigError, match="'train' is both ") as refused:
        splits(tmp_path / "two.npz")
    assert all(name in str(refused.value) for name in arrays)


def test_an_npz_with_a_split_and_the_pairs_of_others_is_refused_and_names_both(tmp_path):
    images, labels = np.zeros((2, 8, 8), np.uint8), np.array([0, 1])
    pairs = {"x_train": images, "y_train": labels}
    for arrays in ({"images": images + 1, "labels": labels} | pairs, pairs | {"images": images + 1, "labels": labels}):
        np.savez(tmp_path / "train.npz", **arrays)
        for place in (tmp_path, tmp_path / "train.npz"):
            with pytest.raises(ConfigError, match=r"train\.npz': it has both images and labels, and x_train and y_train; keep"):
                splits(place)
    np.savez(tmp_path / "train.npz", **pairs)
    with pytest.raises(
        ConfigError, match=r"it has the splits train; name its arrays images and labels, or give the file itself"
    ):
        splits(tmp_path)


def python_2(content: bytes) -> bytes:
    """A pickle of protocol 3 as Python 2 and its NumPy write it: bytes are strings."""
    operations = {b"B": b"T", b"C": b"U"}
    edited = bytearray(b"\x80\x02" + content[2:])
    for operation, _, position in pickletools.genops(content):
        code = operation.code.encode("latin-1")
        edited[position : position + 1] = operations.get(code, code)
    return bytes(edited).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_cifar(folder, classes, binary):
    """CIFAR with one image a class and file; returns {split: (images [N, 32, 32, 3], labels)}."""
    folder.mkdir()
    names, generator = [f"class_{n}" for n in range(classes)], np.random.default_rng(classes)
    key = b"label_names" if classes == 10 else b"fine_label_names"
    if binary:
        file = "batches.meta.txt" if classes == 10 else "fine_label_names.txt"
        (folder / file).write_text("\n".join(names) + "\n\n")
    else:
        meta = pickle.dumps({key: [name.encode() for name in names]}, protocol=3)
        (folder / ("batches.meta" if classes == 10 else "meta")).write_bytes(python_2(meta))
    files = {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]} if classes == 10 else {}
    expected = {}
    for split, batches in (files or {"train": ["train"], "test": ["test"]}).items():
        parts = []
        for batch in batches:
            planes, numbers = generator.integers(0, 256, (classes, 3, 32, 32), np.uint8), generator.permutation(classes)
            parts.append((planes.transpose(0, 2, 3, 1), numbers))
            if binary:
                coarse = [bytes([7])] * (classes == 100)
                records = [b"".join([*coarse, bytes([n]), image.tobytes()]) for n, image in zip(numbers, planes, strict=True)]
                (folder / f"{batch}.bin").write_bytes(b"".join(records))
            else:
                stored = {b"data": planes.reshape(classes, -1), key[: -len("_names")] + b"s": numbers.tolist()}
                (folder / batch).write_bytes(python_2(pickle.dumps(stored, protocol=3)))
        expected[split] = tuple(map(np.concatenate, zip(*parts, strict=True)))
    return expected


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_has_the_pixels_labels_and_names_of_its_files(tmp_path, classes, binary):
    expected = write_cifar(tmp_path / "cifar", classes, binary)
    for split, items in splits(tmp_path / "cifar").items():
        np.testing.assert_array_equal(pixels(items), expected[split][0])
        assert labels(items) == expected[split][1].tolist()
        assert items.classes == [f"class_{n}" for n in range(classes)]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("encoding", ["bytes", "latin1"])
def test_cifar_that_python_3_pickled_again_has_the_same_pixels_and_labels(tmp_path, protocol, encoding):
    expected = write_cifar(tmp_path / "cifar", 10, binary=False)
    forms = (list, np.array, lambda values: np.array(values, ">i4"), lambda values: list(np.array(values)), tuple)
    order = {1: np.asfortranarray, 2: lambda planes: np.repeat(planes, 2, axis=0)[::2]}
    for number, file in enumerate(sorted((tmp_path / "cifar").iterdir())):
        stored = pickle.loads(file.read_bytes(), encoding=encoding)
        key = type(next(iter(stored)))
        text = key if key is str else str.encode
        if (data := text("data")) in stored:
            stored[data] = order.get(number, np.asarray)(stored[data])
            stored[text("labels")] = forms[number % len(forms)](stored[text("labels")])
            stored |= {text("batch_label"): b"", text("filenames"): [b"\xe4.png", "\u03b1.png"]}
        content = pickle.dumps(stored, protocol=protocol)
        file.write_bytes(content.replace(b"numpy._core", b"numpy.core") if protocol < 4 else content)  # as NumPy 1
    for split, items in splits(tmp_path / "cifar").items():
        np.testing.assert_array_equal(pixels(items), expected[split][0])
        assert labels(items) == expected[split][1].tolist()
        assert items.classes == [f"class_{n}" for n in range(10)]


class Hostile:
    """Pickled as a call."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def test_a_pickle_that_is_truncated_or_names_a_function_is_refused_and_calls_nothing(tmp_path, capsys):
    write_cifar(tmp_path / "cifar", 10, binary=False)
    file = tmp_path / "cifar/data_batch_3"
    whole = file.read_bytes()
    floats = pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [0]})
    for damaged in (b"", whole[:1000], whole[:-1], pickle.dumps([1]), pickle.dumps({b"data": [1], b"labels": [1]}), floats):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"data_batch_3 is damaged or truncated: "):
            splits(tmp_path / "cifar")
    for call in ((print, ("executed",)), (exec, ("print('executed')",)), (np.load, (str(file),)), (bytes, (10**15,))):
        for protocol in range(3, 6):
            file.write_bytes(pickle.dumps({b"data": Hostile(*call), b"labels": [0]}, protocol=protocol))
            name = rf"{call[0].__module__}\.{call[0].__name__}"
            with pytest.raises(ConfigError, match=rf"data_batch_3 names {name}, which is not allowed; extract the published"):
                splits(tmp_path / "cifar")
    assert "executed" not in capsys.readouterr().out
    for call in (
        (codecs.encode, ("ab", "hex")),
        (np.ndarray, (10**15,)),
        (np.dtype, ("O",)),
        (codecs.encode, ("\u03b1", "latin1")),
    ):
        file.write_bytes(pickle.dumps({b"data": Hostile(*call), b"labels": [0]}))
        with pytest.raises(ConfigError, match=r"data_batch_3 is damaged or truncated: "):
            splits(tmp_path / "cifar")
    changed = b"c_codecs\nencode\n}X\x0c\x00\x00\x00__defaults__)sb."  # BUILD: sets an attribute of what is named
    file.write_bytes(b"\x80\x02" + changed)
    with pytest.raises(ConfigError, match=r"data_batch_3 is damaged or truncated: "):
        splits(tmp_path / "cifar")
    write_cifar(tmp_path / "binary", 100, binary=True)
    (tmp_path / "binary/test.bin").write_bytes(b"0" * 5000)
    with pytest.raises(ConfigError, match=r"test\.bin is damaged or truncated: ValueError: 5000 bytes, but an image has 3074"):
        splits(tmp_path / "binary")


@pytest.mark.slow
def test_a_data_set_of_hugging_face_has_its_images_and_names(tmp_path, images):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    rows = {"img": [str(tmp_path / f"images/{n}.png") for n in range(4)], "label": LABELS}
    split = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "data").mkdir()
    split.shard(2, 0, contiguous=True).to_parquet(tmp_path / "data/train-00000-of-00002.parquet")
    split.shard(2, 1, contiguous=True).to_parquet(tmp_path / "data/train-00001-of-00002.parquet")
    split.to_parquet(tmp_path / "data/test-00000-of-00001.parquet")
    for items in [*splits(tmp_path / "saved").values(), *splits(tmp_path / "data").values()]:
        assert labels(items) == LABELS
        assert items.classes in (NAMES, 3)
        for found, expected in zip(pixels(items), images, strict=True):
            np.testing.assert_array_equal(found, expected)
    split.save_to_disk(str(tmp_path / "single"))
    single = HuggingFace(tmp_path / "single", Data(source="file"))
    assert (single.names(), labels(single.open("train"))) == (["train"], LABELS)
    with pytest.raises(ConfigError, match=r"no column fine; .*its columns are img, label"):
        splits(tmp_path / "saved", label_column=("fine",))


def test_places_without_a_known_format_are_refused_with_what_to_give(tmp_path, images):
    (tmp_path / "cifar.tar.gz").write_bytes(b"")
    (tmp_path / "deep").mkdir()
    write_cifar(tmp_path / "deep/cifar", 10, binary=True)
    for place, message in (
        ("none", "no such file or folder"),
        ("images/0.png", r"it has no known format; give a (\.\w+, )+\.\w+ file"),
        ("cifar.tar.gz", "it has no known format; extract it, and give the folder"),
        ("images", r"it has no known format; .*--data\.source folder"),
        ("deep", r"use --data\.directory .*deep/cifar"),
        ("s3://bucket/train.csv", "URLs are not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            splits(place if ":" in place else tmp_path / place)
    with pytest.raises(ConfigError, match=r"data\.label_column=.*'x'.*: .*cifar has no columns"):
        splits(tmp_path / "deep/cifar", label_column=("x",))
    with pytest.raises(ConfigError, match=r"it has no split 'fit'; name one of test, train with"):
        splits(tmp_path / "deep/cifar", train_split="fit")
    (tmp_path / "train.csv").write_text(HEADER + GOOD)
    with pytest.raises(ConfigError, match=r"no column 'split'; add it, with train or val"):
        splits(tmp_path / "train.csv")
    (tmp_path / "all.csv").write_text("path,label,split\nimages/0.png,ape,train\nimages/1.png,bee, \n")
    with pytest.raises(ConfigError, match=r"all\.csv': row 3 has no split; add it, or remove the row"):
        splits(tmp_path / "all.csv")
    (tmp_path / "all.csv").unlink()
    (tmp_path / "train.npz").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"it has both train\.csv and train\.npz"):
        splits(tmp_path)


def test_a_run_on_a_table_equals_one_on_the_same_images_in_folders(tiny, tmp_path, pictures):
    for split in ("train", "val"):
        rows = [(str(path.relative_to(pictures)), path.parent.name) for path in sorted((pictures / split).glob("*/*"))]
        write_table(pictures / f"{split}.csv", ["path", "label"], rows)
    results = {}
    for source in ("folder", "file"):
        data = Data(source=source, directory=str(pictures), image_size=32)
        config = with_classes(dataclasses.replace(tiny, data=data, batch=tiny.batch[-1:], epochs=2.0), None)
        results[source] = jaxdp.train(config, tmp_path / source)
    assert results["file"].loss == results["folder"].loss
    assert (tmp_path / "file/classes.json").read_text() == (tmp_path / "folder/classes.json").read_text()
    assert jaxdp.evaluate(None, tmp_path / "file")["eval_examples"] == 12
