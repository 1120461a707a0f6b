"""Data sets at URLs: the same images in the same order as on a disk, from copies or from the URL. Here of file:// URLs."""

import hashlib
import itertools
import os

import numpy as np
import pytest
from helpers.images import folder_config
from helpers.remote_data import at_url

from jaxdp.cloud import read_ahead
from jaxdp.cloud import source as remote
from jaxdp.cloud.location import Location, ObjectInfo, ObjectNotFoundError
from jaxdp.cloud.remote_folder import RemoteFolder
from jaxdp.config import Config, Data, Model, Storage
from jaxdp.data import prefetch, sources
from jaxdp.data.batch_sources import DataError
from jaxdp.errors import ConfigError, StorageError
from jaxdp.setup.consistency import data_digest
from jaxdp.setup.prepare import data_fingerprint


@pytest.fixture
def quick(monkeypatch):
    """Gives up failing requests at once."""
    monkeypatch.setattr(remote, "START_SECONDS", 0.0)
    monkeypatch.setattr(remote, "RUN_SECONDS", 0.0)


def batches(loader, *, seed=3, epochs=2, size=10):
    """The training batches of some epochs, read ahead."""
    rows = [prefetch.BatchRows(p, p) for p in np.arange(len(loader) * epochs // size * size).reshape(-1, size)]
    prefetch.read_ahead(loader, (prefetch.sample_ids(seed, row.order, len(loader)) for row in rows))
    return [prefetch.load_images(loader, seed, row) for row in rows]


def flip_a_byte(monkeypatch):
    """Changes a byte of the next range that is read."""
    read_range = Location.read_range

    def flip(self, *arguments):
        monkeypatch.setattr(Location, "read_range", read_range)
        data = bytearray(read_range(self, *arguments))
        data[100] ^= 1
        return bytes(data)

    monkeypatch.setattr(Location, "read_range", flip)


def assert_equal_batches(one, other):
    for a, b in zip(one, other, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("gigabytes", [1.0, 1e-5], ids=["copied", "larger than the cache"])
def test_a_folder_at_a_url_gives_the_batches_of_the_folder(pictures, tmp_path, gigabytes):
    config = folder_config(pictures)
    local = sources.open_datasets(config)
    for _ in range(2):  # without and with copies
        far = sources.open_datasets(at_url(config, f"file://{pictures}", tmp_path / "cache", gigabytes))
        assert isinstance(far.train.source, RemoteFolder)
        assert (far.classes, far.train.source.labels) == (local.classes, local.train.source.labels)
        assert_equal_batches(batches(local.train), batches(far.train))
        for ours, theirs in ((far.train, local.train), (far.evaluation, local.evaluation)):
            assert data_digest(ours) == data_digest(theirs)
        assert far.train.source.name(8) == f"file://{pictures}/train/dog/1.JPEG"
        assert (far.train.storage_share > 0, local.train.storage_share) == (True, 0)


def test_copies_of_an_image_in_a_batch_are_fetched_once_and_leave_nothing_ahead(pictures, tmp_path):
    """As repeated augmentation asks for them: what is never asked for would take the place of images to come."""
    config = folder_config(pictures)
    far, local = (
        sources.open_datasets(one).train for one in (at_url(config, f"file://{pictures}", tmp_path / "cache"), config)
    )
    order = [np.array([3, 20, 3, 11, 3, 20]), np.array([5, 5, 3])]
    prefetch.read_ahead(far, order)
    for ids in order:
        for ours, theirs in zip(far.batch(ids, ids), local.batch(ids, ids), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert (far.source.ahead.pending, far.source.ahead.items) == ({}, 0)


@pytest.mark.parametrize("held", [True, False])
def test_only_sets_that_reading_ahead_does_not_hold_are_read_in_every_epoch(pictures, tmp_path, monkeypatch, held):
    """Of 24 images, two epochs fit in what is read ahead, or do not; there is no room for copies."""
    monkeypatch.setattr(remote, "ITEMS", 48 if held else 16)
    monkeypatch.setattr(read_ahead, "ITEMS", 48 if held else 16)
    far = sources.open_datasets(at_url(folder_config(pictures), f"file://{pictures}", tmp_path / "cache", 1e-9))
    assert ["of which 100 % will be read" in text for text in far.warnings] == [True, True] * (not held)
    read, names = Location.read, []
    monkeypatch.setattr(Location, "read", lambda self, name, **options: names.append(name) or read(self, name, **options))
    batches(far.train, epochs=4, size=12)
    assert (len(names) == 24) == held


def test_sizes_are_known_without_reading_an_image(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(Location, "read", None)
    config = at_url(folder_config(pictures), f"file://{pictures}", tmp_path / "cache")
    assert sources.inspect(config)[1] == 24


def test_copies_are_used_again_and_replaced_if_damaged_or_out_of_date(pictures, tmp_path, monkeypatch):
    config = at_url(folder_config(pictures), f"file://{pictures}", tmp_path / "cache")
    read, names = Location.read, []
    monkeypatch.setattr(Location, "read", lambda self, name, **options: names.append(name) or read(self, name, **options))
    first = batches(sources.open_datasets(config).train, epochs=1, size=24)
    assert len(names) == 24
    copies = sorted((tmp_path / "cache").rglob("copies/*/*"))
    copies[0].write_bytes(b"")
    copies[1].write_bytes(copies[2].read_bytes())
    os.utime(pictures / "train/cat/0.JPEG", (5, 5))
    names.clear()
    assert_equal_batches(first, batches(sources.open_datasets(config).train, epochs=1, size=24))
    assert 2 <= len(names) <= 3
    assert "train/cat/0.JPEG" in names


@pytest.mark.parametrize(
    "failure", [ObjectNotFoundError("u/a.jpg"), StorageError("no answer", "u/a.jpg")], ids=["gone", "network"]
)
def test_an_image_that_cannot_be_fetched_is_no_bad_image(pictures, tmp_path, monkeypatch, quick, failure):
    config = at_url(folder_config(pictures, on_bad_image="skip"), f"file://{pictures}", tmp_path / "cache")
    loader = sources.open_datasets(config).train

    def fail(self, name, **_):
        raise failure

    monkeypatch.setattr(Location, "read", fail)
    with pytest.raises(DataError, match=r"^u/a.jpg cannot be read: (not found|no answer)$"):
        batches(loader, epochs=1)
    assert loader.bad_images == {}


def test_a_changed_object_stops_the_run(pictures, tmp_path, quick):
    datasets = sources.open_datasets(at_url(folder_config(pictures), f"file://{pictures}", tmp_path / "cache"))
    (pictures / "train/cat/3.JPEG").write_bytes(b"another image")
    with pytest.raises(DataError, match=r"cat/3.JPEG cannot be read: changed since the data set was opened"):
        batches(datasets.train, epochs=1)


def test_torn_downloads_are_repeated(pictures, tmp_path, monkeypatch):
    config, torn, read = folder_config(pictures), itertools.count(), Location.read

    def tear(self, name, **options):
        data = read(self, name, **options)
        return data[: len(data) // 2] if next(torn) % 3 == 0 else data

    monkeypatch.setattr(Location, "read", tear)
    far = sources.open_datasets(at_url(config, f"file://{pictures}", tmp_path / "cache"))
    assert_equal_batches(batches(sources.open_datasets(config).train), batches(far.train))


def records_config(directory):
    data = Data(source="imagenet2012", directory=str(directory), image_size=32, augmentation="random_resized_crop")
    return Config(data=data, model=Model(classes=1000))


@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_prepared_data_at_a_url_are_copied_and_give_the_batches_of_the_disk(request, tmp_path, capsys, file_format):
    """Again from a copy that is damaged; nothing is copied to learn the size."""
    directory = request.getfixturevalue("imagenet" if file_format == "array_record" else "imagenet_tfrecord")
    config = records_config(directory)
    far_config, local = at_url(config, f"file://{directory}", tmp_path / "cache"), sources.open_datasets(config)
    assert sources.inspect(far_config)[1] == 20
    assert not list((tmp_path / "cache").rglob("copies/*/*"))
    for lines in (2, 0):  # of the training and the evaluation split; none with copies
        far = sources.open_datasets(far_config)
        assert capsys.readouterr().err.count(f"GB from file://{directory} to {tmp_path}/cache/") == lines
        assert_equal_batches(batches(local.train), batches(far.train))
        for ours, theirs in ((far.train, local.train), (far.evaluation, local.evaluation)):
            assert data_digest(ours) == data_digest(theirs)
        copies = sorted(file.with_suffix("") for file in (tmp_path / "cache").rglob("copies/*/*.tag"))
        with open(copies[0], "r+b") as file:
            file.seek(100)
            file.write(b"damage")


def test_prepared_data_that_do_not_fit_in_the_cache_raise_one_line(imagenet, tmp_path):
    config = at_url(records_config(imagenet), f"file://{imagenet}", tmp_path / "cache", 1e-6)
    with pytest.raises(ConfigError, match=r"storage.cache_gigabytes=1e-06: files of 0.0 GB are copied before they are read"):
        sources.open_datasets(config)


def test_a_copy_with_a_byte_that_was_flipped_in_transit_is_made_again(imagenet, tmp_path, monkeypatch):
    (file,) = imagenet.rglob("*-train.array_record-*")
    data = file.read_bytes()
    far = remote.RemoteData(f"file://{file.parent}", Storage(directory=str(tmp_path)))
    info = ObjectInfo(len(data), f"md5:{hashlib.md5(data).hexdigest()}")
    monkeypatch.setattr(Location, "info", lambda self, name: info)
    flip_a_byte(monkeypatch)
    assert far.download(file.name, info).read_bytes() == data
    of_kms = info._replace(tag=f"md5:{'0' * 32}")  # looks like an MD5 digest of the content, but is none
    monkeypatch.setattr(Location, "info", lambda self, name: of_kms)
    assert far.download(file.name, of_kms).read_bytes() == data


def test_images_without_permission_raise_one_line_before_training(pictures, tmp_path, monkeypatch):
    def refuse(self, name, **_):
        raise StorageError("Forbidden", f"{self.url}/{name}", permanent=True)

    monkeypatch.setattr(Location, "read", refuse)
    config = at_url(folder_config(pictures), f"file://{pictures}", tmp_path / "cache")
    message = rf"^data.directory='file://{pictures}': file://{pictures}/train/\S+ cannot be read: Forbidden; check the cred"
    with pytest.raises(ConfigError, match=message):
        data_fingerprint(config, sources.open_datasets(config))
