"""Saved data sets of Hugging Face, with a stand-in for the package; test_file.py has the package itself."""

import errno
import sys
import types
from types import SimpleNamespace

import google_crc32c
import pytest

from jaxdp.config import Data
from jaxdp.data import decode, hugging_face
from jaxdp.data.decode import ImageError
from jaxdp.errors import ConfigError, StorageError


class Image:
    def __init__(self, decode=True):
        self.decode = decode


class Dataset:
    """Rows of columns; images are bytes and paths only once their column is cast, and the format of arrays is taken off."""

    def __init__(self, columns, features, plain=False):
        self.columns, self.features, self.plain, self.column_names = columns, features, plain, list(columns)

    def with_format(self, kind):
        assert kind is None
        return Dataset(self.columns, self.features, plain=True)

    def select_columns(self, names):
        return Dataset({name: self.columns[name] for name in names}, self.features, self.plain)

    def cast_column(self, name, feature):
        return Dataset(self.columns, self.features | {name: feature}, self.plain)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        assert self.plain
        if isinstance(key, str):
            return self.columns[key]
        assert type(key) is int
        assert [*self.columns] == ["img"]
        assert self.features["img"].decode is False
        return {name: values[key] for name, values in self.columns.items()}


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """opened(images, labels, names, classes): the split train of a saved data set."""
    package = types.ModuleType("datasets")
    monkeypatch.setitem(sys.modules, "datasets", package)
    package.Image = Image

    def open_with(images, labels, names=None, classes=None, image_type=None):
        features = {"img": image_type or Image(), "label": SimpleNamespace(names=names) if names else "int64"}
        stored = {str(tmp_path): {"train": Dataset({"img": images, "label": labels}, features), "test": None}}
        package.load_from_disk = stored.__getitem__
        place = hugging_face.HuggingFace(tmp_path, Data(source="file", image_column="img"))
        assert place.names() == ["train", "test"]
        return place.open("train", classes)

    return open_with


def image(content=None, path=None):
    return {"bytes": content, "path": path}


def test_a_split_has_the_images_and_labels_of_its_rows(opened, tmp_path):
    (tmp_path / "b.png").write_bytes(b"on the disk")
    images = [image(b"one", "a.png"), image(None, str(tmp_path / "b.png")), None, image()]
    items = opened(images, [2, 0, 1, 0], list("cba"))
    assert (len(items), items.labels.tolist(), items.classes, items.name(3)) == (4, [2, 0, 1, 0], list("cba"), "row 3 of train")
    assert [items[items.labels[1]], items[1]] == [(b"one", 2), (b"on the disk", 0)]
    for row in (2, 3):
        with pytest.raises(ImageError, match="the row has no image" if row == 2 else "No such file"):
            items[row]
    assert items.identity() == [str(google_crc32c.value(b"one")), "b.png", "", ""]
    assert opened(images, [2, 0, 1, 0], list("cba"), classes=list("abc")).labels.tolist() == [0, 2, 1, 2]
    assert (opened(images, [5, 0, 1, 0]).labels.tolist(), opened(images, [5, 0, 1, 0]).classes) == ([5, 0, 1, 0], 6)


@pytest.mark.parametrize(("rows", "sized"), [(5, [0, 2, 4]), (3, [0, 1, 2]), (7, [0, 3, 6]), (6, [0, 2, 4])])
def test_evenly_spaced_images_tell_a_split_from_others(opened, monkeypatch, rows, sized):
    monkeypatch.setattr(hugging_face, "SIZED", 3)
    items = opened([image(None, f"x/{row}") for row in range(rows)], [0, 1] * 3 + [0] if rows == 7 else [0] * rows)
    assert items.identity() == [str(row) for row in sized]


@pytest.mark.parametrize("label", [-1, 2])
def test_labels_without_a_class_and_other_columns_are_refused(opened, label):
    with pytest.raises(ConfigError, match=rf"row 1 of train has the label {label}; remove the row, or .* of the 2 classes"):
        opened([image(b"a")] * 2, [0, label], list("ab"))
    with pytest.raises(ConfigError, match="row 1 of train has no label"):
        opened([image(b"a")] * 2, [0, None], list("ab"))
    with pytest.raises(ConfigError, match="the column 'img' has the type text, not Image"):
        opened([image(b"a")], [0], image_type="text")


def test_an_error_of_the_file_system_is_tried_again_and_names_the_row(opened, monkeypatch):
    monkeypatch.setattr(decode.time, "sleep", lambda seconds: None)
    items, errors = opened([image(b"a")] * 2, [0, 1]), [errno.EIO]
    read = Dataset.__getitem__

    def failing(self, key):
        if errors:
            raise OSError(errors.pop(), "broken")
        return read(self, key)

    monkeypatch.setattr(Dataset, "__getitem__", failing)
    assert items[1] == (b"a", 1)
    for errors[:] in ([errno.ENOENT], [errno.EIO] * 4):
        with pytest.raises(StorageError, match="row 1 of train: broken"):
            items[1]


def test_a_folder_is_told_by_its_file_and_one_that_cannot_be_opened_is_refused(opened, tmp_path, monkeypatch):
    assert not hugging_face.HuggingFace.is_in(tmp_path)
    (tmp_path / "dataset_dict.json").touch()
    assert hugging_face.HuggingFace.is_in(tmp_path) is True
    sys.modules["datasets"].load_from_disk = {}.__getitem__
    with pytest.raises(ConfigError, match=r"datasets cannot open it: KeyError: .*; save it again with save_to_disk"):
        hugging_face.HuggingFace(tmp_path, Data()).names()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="the package datasets is not installed"):
        hugging_face.HuggingFace(tmp_path, Data()).names()
