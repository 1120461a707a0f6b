"""Data sets that tensorflow-datasets has prepared, read without TensorFlow: array_record and TFRecord, with random access."""

import os
import resource
import struct
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import numpy as np

from jaxdp.config import IN_MEMORY, ConfigError
from jaxdp.data.decode import ImageError
from jaxdp.errors import first_line
from jaxdp.flags import nearest

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
            raise ConfigError(
                f"data split {split!r} of {name} is not allowed; there are {known} ({first_line(error)})"
            ) from None
        if self.info.splits[split].num_examples <= 0:
            raise ConfigError(f"data split {split!r} of {name} is not allowed; it has no example")
        for one in instructions:
            if not os.path.exists(one.filename):
                raise ConfigError(f"data.directory: {one.filename} is missing; prepare {name} again")
        readers = {"array_record": _ArrayRecords, "tfrecord": _TFRecords}
        form = self.info.file_format.value
        if form not in readers:
            raise ConfigError(
                f"data.source: {name!r} is not allowed; it is prepared as {form}, and {', '.join(readers)} are read"
            )
        try:
            self.records = readers[form](self.builder, split, instructions)
            len(self.records)
        except ConfigError:
            raise
        except Exception as error:  # by reader: RuntimeError, TypeError
            raise ConfigError(
                f"data.directory: a file of {name}, {split}, is damaged ({first_line(error)}), of "
                f"{Path(instructions[0].filename).parent}; prepare it again"
            ) from None
        if not hasattr(features["label"], "num_classes"):
            raise ConfigError(f"data.source: {name!r} is not allowed; its label is no class")
        self.classes, self.class_names = features["label"].num_classes, features["label"].names

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        try:
            example = self.records[index]
            image = example["image"]
            return (image if isinstance(image, bytes) else getattr(image, "item", lambda: image)()), int(example["label"])
        except (IndexError, ImageError):
            raise
        except Exception as error:  # by reader: RuntimeError, DecodeError, ...
            raise ImageError(f"its record cannot be read ({type(error).__name__}: {first_line(error)})") from None

    def name(self, index) -> str:
        return f"record {index} of {self.label}"


def _builder(name: str, directory: str | None, field: str = "data.source", others=(*IN_MEMORY, "folder")):
    """field: which asked for it; others: what that may be beside a data set of tensorflow-datasets."""
    import tensorflow_datasets as tfds

    asked = f"{field}: {name!r} is not allowed"
    try:
        builder = tfds.builder(name, data_dir=directory) if directory else tfds.builder(name)
    except tfds.core.registered.DatasetNotFoundError:
        near = nearest(name, [*others, *tfds.list_builders(with_community_datasets=False)])
        hint = f"did you mean {near}? " if near else ""
        known = "".join(f"{one}, " for one in others) + "or " * bool(others)
        raise ConfigError(
            f"{asked}; {hint}give {known}a data set of tensorflow-datasets by name, as imagenette or cifar10"
        ) from None
    except Exception as error:  # by data set and damage: ImportError, ValueError, AssertionError, ParseError
        raise ConfigError(f"{asked}; tensorflow-datasets cannot open it: {first_line(error)}") from None
    if not builder.info.splits:
        place = Path(builder.data_dir)
        others = sorted(path.name for path in place.parent.glob("*.*.*") if (path / "dataset_info.json").exists())
        instead = f" (but {', '.join(others)}: give {name}:{others[-1]})" if others else ""
        raise ConfigError(
            f"{asked}; it is not prepared in {place}{instead}; prepare it by `jaxdp data prepare {name}`, give its directory "
            "by --data.directory, or rehearse on made-up images by --data.source synthetic"
        )
    return builder


def _without_decoding():
    import tensorflow_datasets as tfds

    return {"image": tfds.decode.SkipDecoding()}


def _taken(instruction) -> int:
    """Examples that an instruction takes of its file; its `take` is -1 for all that are left."""
    return instruction.take if instruction.take >= 0 else instruction.examples_in_shard - instruction.skip


class _ArrayRecords:
    """tensorflow-datasets' own random access."""

    def __init__(self, builder, split, instructions):
        _allow_open_files(len(instructions))
        self.source = builder.as_data_source(split, decoders=_without_decoding())

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.source[int(index)]


def _allow_open_files(count: int) -> None:
    """ImageNet has 1,024 files, all of them held open, and 1,024 is the usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


class _TFRecords:
    """Random access to TFRecord files: the offsets of their records are found by reading the headers once."""

    def __init__(self, builder, split, instructions):
        self.features, self.decoders = builder.info.features, _without_decoding()
        self.paths = [str(one.filename) for one in instructions]
        with ThreadPoolExecutor(8) as threads:
            offsets = list(threads.map(_record_offsets, self.paths, [one.examples_in_shard for one in instructions]))
        self.offsets = [held[one.skip : one.skip + _taken(one)] for held, one in zip(offsets, instructions, strict=True)]
        self.starts = [0]
        for held in self.offsets:
            self.starts.append(self.starts[-1] + len(held))

    def __len__(self):
        return self.starts[-1]

    def __getitem__(self, index):
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = bisect_right(self.starts, index) - 1
        offset, length = self.offsets[shard][index - self.starts[shard]].tolist()
        with open(self.paths[shard], "rb", buffering=0) as file:
            raw = os.pread(file.fileno(), length + FOOTER, offset + HEADER)
        if _masked_checksum(raw[:length]) != raw[length:]:
            raise ImageError(f"the checksum of its data in {self.paths[shard]} is wrong")
        return self.features.deserialize_example_np(raw[:length], decoders=self.decoders)


def _masked_checksum(data: bytes) -> bytes:
    """As TFRecord has it: CRC-32C, turned by 15 bits, plus a constant."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def _record_offsets(path: str, expected: int) -> np.ndarray:
    """(offset, length of its data) of every record in a file, int64 [N, 2].

    Raises ConfigError where it ends within a record, has another number of them than expected, or a length is damaged.
    """
    found, offset = [], 0
    size = Path(path).stat().st_size
    damaged = f"data.directory: {path} is damaged"
    with open(path, "rb") as file:
        while offset < size:
            file.seek(offset)
            header = file.read(HEADER)
            if len(header) < HEADER:
                raise ConfigError(f"{damaged}: its record at byte {offset} is cut off; prepare it again")
            if _masked_checksum(header[:8]) != header[8:]:
                raise ConfigError(f"{damaged}: the length of its record at byte {offset} is wrong; prepare it again")
            (length,) = struct.unpack("<Q", header[:8])
            after = offset + HEADER + length + FOOTER
            if after > size:
                raise ConfigError(f"{damaged}: its record at byte {offset} is cut off; prepare it again")
            found.append((offset, length))
            offset = after
    if len(found) != expected:
        raise ConfigError(f"{damaged}: it has {len(found)} records of {expected}; prepare it again")
    return np.array(found, np.int64).reshape(-1, 2)


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

    if name in ("folder", "given", *IN_MEMORY):
        raise ConfigError(f"data prepare: {name!r} is not allowed; it needs no preparing; give a name of tensorflow-datasets")
    try:
        return str(_builder(name, directory, "data prepare", ()).data_dir)
    except ConfigError as error:
        if "is not prepared" not in str(error):
            raise
    base = name.split("/")[0].split(":")[0]
    if importlib.util.find_spec("tensorflow") is None:
        manual = f"; it will also need {MANUAL[base][0]}" if base in MANUAL else ""
        raise ConfigError(
            f"data prepare: {name} cannot be prepared; TensorFlow is missing, which preparing needs and training does not: "
            f"pip install -e '.[prepare]', here or on another machine, and copy the prepared directory{manual}"
        )
    builder = tfds.builder(name, file_format="array_record", **({"data_dir": directory} if directory else {}))
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
        raise ConfigError(f"data prepare: {name} cannot be prepared; {type(error).__name__}: {first_line(error)}") from None
    return str(builder.data_dir)
