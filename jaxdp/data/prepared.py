"""Data sets that tensorflow-datasets has prepared, read without TensorFlow: array_record and TFRecord, with random access."""

import os
import struct
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxdp.config import ConfigError

HEADER, FOOTER = 12, 4  # bytes of a TFRecord around its data: length and its checksum, checksum of the data


class Prepared:
    """The examples of a split (slices such as train[:10%] included) as (encoded image, label)."""

    def __init__(self, name: str, directory: str | None, split: str):
        """Raises ConfigError where the data set, its prepared files or the split are missing."""
        self.builder = _builder(name, directory)
        self.info, self.label = self.builder.info, f"{name}, {split}"
        features = self.info.features
        for needed in ("image", "label"):
            if needed not in features:
                raise ConfigError(f"data.source: {name!r} is not allowed; it has no {needed!r}, only {', '.join(features)}")
        try:
            instructions = self.info.splits[split].file_instructions
        except (KeyError, ValueError) as error:
            known = ", ".join(self.info.splits)
            raise ConfigError(f"data split {split!r} of {name} is not allowed; there are {known} ({_line(error)})") from None
        if str(self.info.file_format) == "FileFormat.ARRAY_RECORD" or "array" in str(self.info.file_format).lower():
            self.records = _ArrayRecords(self.builder, split)
        else:
            self.records = _TFRecords(self.info, instructions)
        self.classes = features["label"].num_classes

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        example = self.records[index]
        image = example["image"]
        return (image if isinstance(image, bytes) else getattr(image, "item", lambda: image)()), int(example["label"])

    def name(self, index) -> str:
        return f"record {index} of {self.label}"


def _builder(name: str, directory: str | None):
    import tensorflow_datasets as tfds

    asked = f"data.source: {name!r} is not allowed"
    try:
        builder = tfds.builder(name, data_dir=directory) if directory else tfds.builder(name)
    except tfds.core.registered.DatasetNotFoundError:
        raise ConfigError(
            f"{asked}; give digits, synthetic, folder, or a data set of tensorflow-datasets by name, as imagenette or cifar10"
        ) from None
    except (ImportError, AttributeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{asked}; tensorflow-datasets cannot open it: {_line(error)}") from None
    if not builder.info.splits:
        raise ConfigError(
            f"{asked}; it is not prepared in {builder.data_dir}; prepare it by `jaxdp data prepare {name}`, give its directory "
            "by --data.directory, or rehearse on made-up images by --data.source synthetic"
        )
    return builder


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _without_decoding():
    import tensorflow_datasets as tfds

    return {"image": tfds.decode.SkipDecoding()}


class _ArrayRecords:
    """tensorflow-datasets' own random access."""

    def __init__(self, builder, split):
        self.source = builder.as_data_source(split, decoders=_without_decoding())

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.source[int(index)]


class _TFRecords:
    """Random access to TFRecord files: the offsets of their records are found by reading the headers once."""

    def __init__(self, info, instructions):
        self.features, self.decoders = info.features, _without_decoding()
        self.paths = [str(one.filename) for one in instructions]
        with ThreadPoolExecutor(8) as threads:
            offsets = list(threads.map(_record_offsets, self.paths))
        self.offsets = [
            held[one.skip : one.skip + one.take] if one.take >= 0 else held[one.skip :]
            for held, one in zip(offsets, instructions, strict=True)
        ]
        self.starts = [0]
        for held in self.offsets:
            self.starts.append(self.starts[-1] + len(held))
        self.files = [os.open(path, os.O_RDONLY) for path in self.paths]

    def __len__(self):
        return self.starts[-1]

    def __getitem__(self, index):
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = bisect_right(self.starts, index) - 1
        offset, length = self.offsets[shard][index - self.starts[shard]]
        raw = os.pread(self.files[shard], length, offset + HEADER)
        return self.features.deserialize_example_np(raw, decoders=self.decoders)


def _record_offsets(path: str) -> list[tuple[int, int]]:
    """(offset, length of its data) of every record in a file. Raises ConfigError for one that ends within a record."""
    found, offset = [], 0
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        while offset < size:
            file.seek(offset)
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            after = offset + HEADER + length + FOOTER
            if after > size:
                raise ConfigError(
                    f"data.directory: {path} is damaged: its record at byte {offset} is cut off; prepare it again"
                )
            found.append((offset, length))
            offset = after
    return found


MANUAL = {
    "imagenet2012": (
        "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, which image-net.org gives to those who register",
        ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"),
    ),
}


def prepare(name: str, directory: str | None = None, manual_directory: str | None = None) -> str:
    """Download a data set and prepare it as array_record; the directory of its files. What is prepared already is left alone.

    manual_directory: where archives lie that cannot be downloaded. Raises ConfigError, saying what is missing, where it cannot.
    """
    import importlib.util

    import tensorflow_datasets as tfds

    try:
        return str(_builder(name, directory).data_dir)
    except ConfigError as error:
        if "is not prepared" not in str(error):
            raise
    if importlib.util.find_spec("tensorflow") is None:
        raise ConfigError(
            f"data prepare: {name} cannot be prepared; TensorFlow is missing, which preparing needs and training does not: "
            "pip install -e '.[prepare]', here or on another machine, and copy the prepared directory"
        )
    builder = tfds.builder(name, file_format="array_record", **({"data_dir": directory} if directory else {}))
    base = name.split("/")[0].split(":")[0]
    if base in MANUAL:
        told, files = MANUAL[base]
        place = Path(manual_directory or Path(builder.data_dir).parents[1] / "downloads/manual")
        missing = [file for file in files if not (place / file).exists()]
        if missing:
            raise ConfigError(
                f"data prepare: {name} needs {told}; {', '.join(missing)} not in {place}; give --manual-directory"
            )
    options = tfds.download.DownloadConfig(manual_dir=manual_directory)
    try:
        builder.download_and_prepare(download_config=options)
    except Exception as error:  # by data set and release: no network, no space, a changed checksum
        raise ConfigError(f"data prepare: {name} cannot be prepared; {type(error).__name__}: {_line(error)}") from None
    return str(builder.data_dir)
