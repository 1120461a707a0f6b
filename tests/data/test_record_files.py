"""array_record and TFRecord files: equal examples, checksums, and damage that is found when they are opened."""

import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from helpers.step import with_parts
from helpers.tfds_miniature import frame_record, open_split

from jaxdp.config import Config, Data
from jaxdp.data import record_files, sources
from jaxdp.data.batch_sources import DataError, DecodedImages
from jaxdp.data.host_crops import center_crop
from jaxdp.errors import ConfigError


@pytest.mark.parametrize("split", ["train", "train[25%:75%]"])
def test_tfrecord_and_array_record_return_equal_examples(imagenet, imagenet_tfrecord, split):
    one = open_split("imagenet2012", str(imagenet), split)
    other = open_split("imagenet2012", str(imagenet_tfrecord), split)
    assert isinstance(other.records, record_files.TFRecords)
    assert len(one) == len(other) > 0
    assert [other[n] for n in range(len(other))] == [one[n] for n in range(len(one))]
    with pytest.raises(IndexError):
        other[len(other)]


def test_array_records_may_need_more_open_files_than_the_limit(imagenet, monkeypatch):
    needed = []
    monkeypatch.setattr(record_files, "allow_open_files", needed.append)
    open_split("imagenet2012", str(imagenet), "train")
    assert needed == [1]


def test_open_tfrecord_with_missing_records_raises(imagenet_tfrecord):
    file = imagenet_tfrecord / "imagenet2012/5.1.0/imagenet2012-train.tfrecord-00001-of-00002"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    file.write_bytes(data[: 12 + length + 4])
    with pytest.raises(ConfigError, match=r"00001-of-00002': damaged file: 1 records, expected 7; prepare it again"):
        open_split("imagenet2012", str(imagenet_tfrecord), "train")
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ConfigError, match="the length of the record at byte 0 has the wrong checksum"):
        open_split("imagenet2012", str(imagenet_tfrecord), "train")
    file.unlink()
    with pytest.raises(ConfigError, match=r"00001-of-00002': file not found; prepare imagenet2012 again"):
        open_split("imagenet2012", str(imagenet_tfrecord), "train")


def test_a_tfrecord_file_truncated_anywhere_is_refused_with_the_place(tmp_path):
    parts, file = [frame_record(bytes(length)) for length in (0, 5, 300)], tmp_path / "fruit.tfrecord"
    starts = np.cumsum([0, *map(len, parts)])
    file.write_bytes(b"".join(parts))
    np.testing.assert_array_equal(record_files.record_offsets(str(file), 3), np.transpose([starts[:3], [0, 5, 300]]))
    for length in {1, 11, 12, 15, 16, 17, 27, 28, 36, 37, 38, starts[-1] - 1} - {*starts.tolist()}:
        file.write_bytes(b"".join(parts)[:length])
        last = starts[starts < length].max()
        with pytest.raises(ConfigError, match=rf"damaged file: the record at byte {last} is truncated; prepare it again"):
            record_files.record_offsets(str(file), 3)
    file.write_bytes(b"")
    assert record_files.record_offsets(str(file), 0).shape == (0, 2)


def test_damaged_tfrecord_is_named_or_skipped(imagenet_tfrecord):
    file = imagenet_tfrecord / "imagenet2012/5.1.0/imagenet2012-train.tfrecord-00001-of-00002"
    data = bytearray(file.read_bytes())
    data[100] ^= 16
    file.write_bytes(bytes(data))
    config = Config(
        data=Data(source="imagenet2012", directory=str(imagenet_tfrecord), image_size=32, augmentation="random_resized_crop"),
    )
    source = sources.open_datasets(config).train
    with pytest.raises(DataError, match=r"record 13 of imagenet2012, train cannot be used: checksum mismatch in .*"):
        source.batch(np.array([13]), np.array([0]))
    config = with_parts(config, data={"on_bad_image": "skip"})
    source = sources.open_datasets(config).train
    source.batch(np.arange(20), np.arange(20))
    assert list(source.bad_images) == ["record 13 of imagenet2012, train"]


def read_all(directory):
    source = open_split("imagenet2012", str(directory), "train")
    loader = DecodedImages(source, transform=lambda image, out, _: center_crop(image, out, 8), size=8, target=1000)
    return loader.batch(np.arange(20), np.arange(20))


@pytest.mark.parametrize("damage", ["flipped", "empty", "half", "missing"])
def test_damaged_array_record_raises(imagenet, tmp_path, damage):
    shutil.copytree(imagenet, tmp_path / "tfds")
    file = tmp_path / "tfds/imagenet2012/5.1.0/imagenet2012-train.array_record-00000-of-00001"
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        middle = bytes(255 - byte for byte in data[1000:3000])
        file.write_bytes({"flipped": data[:1000] + middle + data[3000:], "empty": b"", "half": data[: len(data) // 2]}[damage])
    with pytest.raises((ConfigError, DataError), match="imagenet2012") as error:
        read_all(tmp_path / "tfds")
    assert "\n" not in str(error.value)


def test_check_array_record_truncated_anywhere_raises(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    file = tmp_path / "fruit-train.array_record-00000-of-00001"
    writer = ArrayRecordWriter(str(file), "group_size:1")
    for n in range(200):
        writer.write(np.random.default_rng(n).bytes(2000))
    writer.close()
    record_files.check_array_record(str(file), 200)
    with pytest.raises(ConfigError, match=r"damaged file: 200 records, expected 100; prepare it again$"):
        record_files.check_array_record(str(file), 100)
    with pytest.raises(OSError, match=r"regular file|directory"):  # nor would a pipe be waited for
        record_files.check_array_record(str(tmp_path), 200)
    data = file.read_bytes()
    for length in (0, 1, 70_000, len(data) // 2, len(data) - 65_536, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=r"^data.directory=.*00000-of-00001': damaged file: .*; prepare it again$"):
            record_files.check_array_record(str(file), 200)


def test_masked_checksum_is_crc32c():
    crc = struct.unpack("<I", record_files.masked_checksum(b"123456789"))[0]
    assert crc == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF  # the published check value


MANY_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
from jaxdp.files import allow_open_files
allow_open_files(1024)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_allow_open_files_raises_the_limit_for_imagenet():
    out = subprocess.run([sys.executable, "-c", MANY_FILES], capture_output=True, text=True, check=True).stdout
    assert int(out) >= 1024 + 100
