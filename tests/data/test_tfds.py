"""Prepared data sets of tensorflow-datasets: reading, errors, and preparation."""

import errno
import io
import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.images import encode, smooth_image
from helpers.tfds_miniature import open_split, prepare_miniature

from jaxdp.config import Config, Data, Model, Storage
from jaxdp.data import decode, sources, tfds
from jaxdp.data.decode import ImageError
from jaxdp.errors import ConfigError, StorageError


@pytest.mark.parametrize(
    ("name", "version", "shape", "classes", "held_out"),
    [
        ("cifar10", "3.0.2", (32, 32, 3), 10, "test"),
        ("mnist", "3.0.1", (28, 28, 1), 10, "test"),
        ("imagenette", "1.0.0", (None, None, 3), 10, "validation"),
    ],
)
def test_open_datasets_reads_tfds_by_name(tmp_path, name, version, shape, classes, held_out):
    """Data sets with the names, features and evaluation splits of tensorflow-datasets, as small PNGs and JPEGs."""
    import tensorflow_datasets as tfds

    large = shape[0] is None
    form = "JPEG" if large else "PNG"
    features = {
        "image": tfds.features.Image(shape=shape, encoding_format=form.lower()),
        "label": tfds.features.ClassLabel(num_classes=classes),
    }
    pixels = [smooth_image(*(shape[:2] if not large else (50, 60)), seed=n) for n in range(13)]
    mode = "L" if shape[2] == 1 else "RGB"

    def examples(numbers):
        return [(io.BytesIO(encode(pixels[n], form, mode)), {"label": n % classes}) for n in numbers]

    configs = ("full-size-v2",) if large else ()
    splits = {"train": examples(range(9)), held_out: examples(range(9, 13))}
    prepare_miniature(tmp_path, name=name, version=version, features=features, splits=splits, configs=configs)
    config = Config(
        data=Data(source=name, directory=str(tmp_path), image_size=32, augmentation="none"), model=Model(classes=classes)
    )
    opened = sources.open_datasets(config)
    assert (len(opened.train), len(opened.evaluation)) == (9, 4)
    assert opened.train.images.shape == (9, 32, 32, 3)
    assert sorted(opened.train.labels) == list(range(9))
    assert sorted(opened.evaluation.labels) == sorted(n % classes for n in range(9, 13))
    first = opened.train.images[list(opened.train.labels).index(4)]
    if shape == (32, 32, 3):
        np.testing.assert_array_equal(first, pixels[4])
    if shape[2] == 1:
        np.testing.assert_array_equal(first[..., 0], first[..., 2])


def test_open_reads_examples_and_slices_without_tensorflow(imagenet):
    source = open_split("imagenet2012", str(imagenet), "train")
    assert (len(source), source.classes) == (20, 1000)
    seen = sorted(source[n] for n in range(20))
    expected = sorted((encode(smooth_image(40, 50, seed=n)), 37 * n % 1000) for n in range(20))
    assert seen == expected
    half = open_split("imagenet2012", str(imagenet), "train[:50%]")
    assert [half[n] for n in range(10)] == [source[n] for n in range(10)]
    assert len(open_split("imagenet2012", str(imagenet), "train[:1]")) == 1
    assert source.name(3) == "record 3 of imagenet2012, train"
    for image in (b"pixels\0", np.array(b"pixels\0", object)):  # by release of tensorflow-datasets
        source.features = SimpleNamespace(
            deserialize_example_np=lambda *_, image=image, **__: {"image": image, "label": np.int64(2)}
        )
        assert source[0] == (b"pixels\0", 2)


def test_errors_of_a_data_set_at_a_url_name_the_url(imagenet, tmp_path):
    local, url, asked = tmp_path / "local", "s3://bucket/sets", []
    shutil.copytree(imagenet, local)
    records = local / "imagenet2012/5.1.0/imagenet2012-train.array_record-00000-of-00001"
    urls = {str(records): f"{url}/records"}
    remote = SimpleNamespace(directory=local, url=url, urls=urls, copied=lambda files: asked.append(files) or files)
    config = Config(data=Data(source="imagenet2012", directory=url))
    splits = tfds.PreparedSplits(config, remote)
    assert splits.names() == ["train", "validation"]
    source = splits.open("train")
    assert asked == [source.instructions]
    assert source[3] == open_split("imagenet2012", str(imagenet), "train")[3]
    records.write_bytes(b"no records")
    with pytest.raises(ConfigError, match=rf"^data.directory='{url}/records': damaged file: "):
        splits.open("train")
    records.unlink()
    assert len(splits.describe("train")) == 20  # without its files
    with pytest.raises(ConfigError, match=rf"data.source='imagenette': not prepared in {url}/imagenette"):
        tfds.TfdsSource("imagenette", url, "train", field="data.train_split", remote=remote)


class Failing:
    """Records whose reads raise the given errors first."""

    def __init__(self, records, errors):
        self.records, self.errors = records, errors

    def __getitem__(self, index):
        if self.errors:
            raise self.errors.pop()
        return self.records[index]


def test_errors_of_the_files_are_retried_and_say_nothing_about_the_record_but_damage_does(imagenet, monkeypatch):
    slept, source = [], open_split("imagenet2012", str(imagenet), "train")
    monkeypatch.setattr(decode.time, "sleep", slept.append)
    expected, errors = source[3], []
    source.records = Failing(source.records, errors)
    errors += [OSError(errno.EIO, "broken")] * 3
    assert source[3] == expected
    assert slept == list(decode.RETRY_DELAYS)
    for number, times in ((errno.EIO, 4), (errno.ENOENT, 1)):
        errors += [OSError(number, "broken")] * times
        with pytest.raises(StorageError, match="record 3 of imagenet2012, train: broken"):
            source[3]
        assert not errors
    errors.append(RuntimeError("damaged\nchunk"))
    with pytest.raises(ImageError, match=r"^cannot read the record \(RuntimeError: damaged"):
        source[3]
    for index in (-1, 20):
        with pytest.raises(IndexError):
            source[index]


def test_size_of_a_published_data_set_is_known_without_it_and_otherwise_that_of_its_split(imagenet, tmp_path):
    size = tfds.Prepared().size
    assert size(Config(data=Data(source="imagenet2012"))) == (1_281_167, 1000)
    assert size(Config(data=Data(source="imagenet2012", directory=str(imagenet)))) == (20, 1000)
    at_url = Data(source="imagenet2012", directory=f"file://{imagenet}")
    assert size(Config(data=at_url, storage=Storage(directory=str(tmp_path)))) == (20, 1000)
    part = Data(source="imagenet2012", directory=str(imagenet), train_split="validation[:3]")
    assert size(Config(data=part)) == (3, 1000)
    assert tfds.Prepared().data_set(Config(data=part)).names() == ["train", "validation"]


def test_data_that_cannot_be_read_are_refused_with_what_to_do(imagenet, tmp_path):
    def error(change, name="imagenet2012"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        shutil.copytree(imagenet / "imagenet2012", tmp_path / name)
        change(tmp_path / name / "5.1.0")
        with pytest.raises(ConfigError) as raised:
            open_split(name, str(tmp_path), "train")
        return str(raised.value)

    def replace(name, old, new):
        return lambda place: (place / name).write_text((place / name).read_text().replace(old, new))

    records = "imagenet2012-train.array_record-00000-of-00001"
    found = error(replace("dataset_info.json", '"array_record"', '"riegeli"'))
    assert "prepared as riegeli; supported are array_record, tfrecord; prepare it again with jaxdp data prepare" in found
    found = error(replace("features.json", '"label"', '"klass"'), "fruit")  # whose features no package knows
    assert re.search(r"its features are .*klass.*, not an image and the class in a label; choose a data set for", found)
    assert f"{records}': file not found; prepare imagenet2012 again" in error(lambda place: (place / records).unlink())
    assert f"{records}': damaged file: " in error(lambda place: (place / records).write_bytes(b"no records"))


def test_an_unknown_data_set_is_refused_with_similar_names(tmp_path):
    with pytest.raises(
        ConfigError, match=r"'imagenete': unknown data set; did you mean imagenette\? give digits, .*, or a data"
    ):
        open_split("imagenete", str(tmp_path), "train")
    with pytest.raises(ConfigError, match=r"^NAME='imagenete': unknown data set; did you mean imagenette\? give a data set of"):
        tfds.open_builder("imagenete", str(tmp_path), field="NAME", alternatives=())


def test_open_unknown_version_or_config_lists_prepared_ones(imagenet, tmp_path):
    """For a data set that tensorflow-datasets knows, and for one that it does not."""
    for name in ("imagenet2012", "fruit"):
        shutil.copytree(imagenet / "imagenet2012", tmp_path / name)
    for name in ("imagenet2012:9.9.9", "fruit:9.9.9", "fruit/x"):
        with pytest.raises(ConfigError, match=rf"data.source='{name}': .*prepared are {name[:5]}\w*:5\.1\.0"):
            open_split(name, str(tmp_path), "train")


def test_open_metadata_that_is_a_pipe_raises_and_does_not_wait_for_a_writer(imagenet, tmp_path):
    shutil.copytree(imagenet / "imagenet2012", tmp_path / "imagenet2012")
    pipe = tmp_path / "imagenet2012/5.1.0/features.json"
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"features\.json is not a regular file; prepare it again"):
        open_split("imagenet2012", str(tmp_path), "train")


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("imagenet2012", "train[90%:10%]", "imagenet2012 has no examples there"),
        ("imagenet2012", "train[5:5]", "imagenet2012 has no examples there"),
        ("imagenet2012", "trian", r"data.train_split='trian': not a split of imagenet2012 .*; give train, validation"),
        ("imagenette", "train", r"data.source='imagenette': not prepared in .*`jaxdp data prepare imagenette`"),
    ],
)
def test_open_missing_data_set_raises_one_line(imagenet, name, split, message):
    with pytest.raises(ConfigError, match=message) as error:
        open_split(name, str(imagenet), split)
    assert "\n" not in str(error.value)


def test_prepare_leaves_prepared_data_unchanged(imagenet, monkeypatch):
    monkeypatch.setenv("HOME", str(imagenet))
    for directory in (str(imagenet), "~"):
        assert tfds.prepare("imagenet2012", directory) == str(imagenet / "imagenet2012/5.1.0")
    for options, flag in (({"directory": "s3://a"}, "--directory"), ({"manual_directory": "s3://a"}, "--manual-directory")):
        with pytest.raises(ConfigError, match=f"{flag}='s3://a'"):
            tfds.prepare("imagenet2012", **options)


def test_another_error_of_a_reader_is_damage_of_the_split(imagenet, monkeypatch):
    source = open_split("imagenet2012", str(imagenet), "train")
    monkeypatch.setitem(tfds.READERS, source.file_format, lambda files: 1 / 0)
    message = r"^data.directory='.*/5\.1\.0': a file of imagenet2012, train, is damaged \(division by zero\); prepare it again$"
    with pytest.raises(ConfigError, match=message):
        source.read()


def test_prepare_names_the_archives_that_must_be_downloaded_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    (tmp_path / "manual").mkdir()
    (tmp_path / "manual/ILSVRC2012_img_val.tar").touch()
    both, one = "ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar", "ILSVRC2012_img_train.tar"
    for manual, missing, place in ((None, both, "downloads/manual"), (str(tmp_path / "manual"), one, "manual")):
        with pytest.raises(ConfigError, match=rf"NAME='imagenet2012': {missing} not found in {tmp_path}/{place}; download"):
            tfds.prepare("imagenet2012", str(tmp_path), manual)
    with pytest.raises(ConfigError, match="NAME='digits': this source needs no preparation"):
        tfds.prepare("digits")


def test_prepare_without_tensorflow_raises(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"NAME='cifar10': TensorFlow is missing.*pip install -e '.\[prepare\]'"):
        tfds.prepare("cifar10", str(tmp_path))
