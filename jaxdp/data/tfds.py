"""Data sets that tensorflow-datasets has prepared, on a disk or at a URL; training reads them without TensorFlow."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdp.choices import SOURCES
from jaxdp.config import Config
from jaxdp.data import progress
from jaxdp.data.datasets import FileSource, SplitReader, stated_classes
from jaxdp.data.decode import ImageError, retried
from jaxdp.data.record_files import READERS
from jaxdp.errors import ConfigError, StorageError, first_line, nearest
from jaxdp.files import check_local, expand_user, is_url

if TYPE_CHECKING:
    from jaxdp.cloud.remote_prepared import RemotePrepared

OTHER_SOURCES = tuple(name for name, one in SOURCES.items() if not (one.prepared or one.from_python))
# Downloaded by hand; tensorflow-datasets would leave out the split of a missing one.
ARCHIVES = {"imagenet2012": ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar")}


class NotPreparedError(ConfigError):
    """A data set that tensorflow-datasets knows and that has not been prepared."""


class Prepared(FileSource):
    """A data set of tensorflow-datasets, by its name there."""

    def size(self, config: Config) -> tuple[int, int | None]:
        """See `RemoteData.size`; a published size is known without the data."""
        data, published = config.data, SOURCES[config.data.source]
        if data.holdout:
            return super().size(config)
        if published.train_images is not None and data.train_split == "train" and data.directory is None:
            return published.train_images, published.classes
        train = self.data_set(config).describe(data.train_split)
        return len(train), stated_classes(train)

    def data_set(self, config: Config) -> "PreparedSplits":
        if not is_url(config.data.directory or ""):
            return PreparedSplits(config, None)
        from jaxdp.cloud.remote_prepared import RemotePrepared
        from jaxdp.cloud.source import RemoteData  # and the client of object storage, which a local disk does not need

        remote = RemoteData(config.data.directory or "", config.storage, progress.report)
        return PreparedSplits(config, RemotePrepared(remote, config.data.source))


class PreparedSplits(SplitReader):
    """The splits of a prepared data set, and slices of them such as train[:10%]. remote: the data set, if it is at a URL."""

    def __init__(self, config: Config, remote: "RemotePrepared | None") -> None:
        self.config, self.remote, self.place = config, remote, config.data.source

    def names(self) -> list[str]:
        directory = str(self.remote.directory) if self.remote else self.config.data.directory
        return list(open_builder(self.config.data.source, directory).info.splits)

    def open(self, name: str, classes: list[str] | None = None) -> "TfdsSource":
        source = self.describe(name)
        source.read()
        return source

    def describe(self, name: str) -> "TfdsSource":
        """A split whose files have been neither copied nor opened; on a disk, they exist."""
        data = self.config.data
        field = "data.train_split" if name == data.train_split else "data.eval_split"
        return TfdsSource(data.source, data.directory, name, field=field, remote=self.remote)


class TfdsSource:
    """The examples of a split, or of a slice such as train[:10%], as (encoded image, label); `read` opens its files."""

    def __init__(self, name: str, directory: str | None, split: str, *, field: str, remote: "RemotePrepared | None") -> None:
        """directory: where tensorflow-datasets keeps its data, None for its default; field: config field of `split`.

        Raises ConfigError for an unknown data set or split, and a data set without images and labels.
        """
        import tensorflow_datasets as tfds

        try:
            builder = open_builder(name, str(remote.directory) if remote else directory)
        except ConfigError as error:
            if remote is None:
                raise
            reason = error.reason.replace(str(remote.directory), remote.url)
            raise ConfigError(error.field, error.value, reason=reason, hint=error.hint) from None
        features, splits = builder.info.features, builder.info.splits
        if not {"image", "label"} <= {*features} or not hasattr(features["label"], "num_classes"):
            reason = f"its features are {', '.join(features)}, not an image and the class in a label"
            raise ConfigError("data.source", name, reason=reason, hint="choose a data set for classification")
        try:
            instructions = splits[split].file_instructions
        except (KeyError, ValueError) as error:
            reason = f"not a split of {name} ({first_line(error)})"
            raise ConfigError(field, split, reason=reason, hint=f"give {', '.join(splits)}") from None
        if splits[split].num_examples <= 0:
            raise ConfigError(field, split, reason=f"{name} has no examples there")
        file_format = builder.info.file_format.value
        if file_format not in READERS:
            reason = f"prepared as {file_format}; supported are {', '.join(READERS)}"
            raise ConfigError("data.source", name, reason=reason, hint=f"prepare it again with jaxdp data prepare {name}")
        for file in () if remote else instructions:
            if not os.path.exists(file.filename):
                hint = f"prepare {name} again"
                raise ConfigError("data.directory", str(file.filename), reason="file not found", hint=hint)
        self.label, self.remote = f"{name}, {split}", remote
        self.features, self.instructions, self.file_format = features, instructions, file_format
        self.examples, self.classes = splits[split].num_examples, features["label"].num_classes
        self.class_names = features["label"].names
        self.decoders = {"image": tfds.decode.SkipDecoding()}
        self.records: Sequence[bytes] = ()

    def read(self) -> None:
        """Open the files, which are copied first if they are at a URL. Raises ConfigError for missing or damaged ones."""
        files = self.remote.copied(self.instructions) if self.remote else self.instructions
        try:
            self.records = READERS[self.file_format](files)
        except ConfigError as error:
            place = self.remote.urls.get(str(error.value), error.value) if self.remote else error.value
            raise ConfigError(error.field, place, reason=error.reason, hint=error.hint) from None
        except Exception as error:  # RuntimeError or TypeError, by reader
            folder = str(Path(self.instructions[0].filename).parent)
            reason = f"a file of {self.label}, is damaged ({first_line(error)})"
            raise ConfigError("data.directory", folder, reason=reason, hint="prepare it again") from None

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """(encoded image, label). Raises ImageError for a damaged record, StorageError for an error of the file system."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        try:
            record = retried(lambda: self.records[int(index)], self.name(index))
            example = self.features.deserialize_example_np(record, decoders=self.decoders)
        except ImageError:
            raise
        except OSError as error:  # of the file system: it says nothing about the image
            raise StorageError(error.strerror or first_line(error), self.name(index)) from error
        except Exception as error:  # RuntimeError, DecodeError, ..., by reader
            raise ImageError(f"cannot read the record ({type(error).__name__}: {first_line(error)})") from None
        return np.asarray(example["image"], object).item(), int(example["label"])  # bytes, or an array of them

    def name(self, index: int) -> str:
        """The record's number, data set and split."""
        return f"record {index} of {self.label}"


def open_builder(
    name: str, directory: str | None, *, field: str = "data.source", alternatives: tuple[str, ...] = OTHER_SOURCES
) -> Any:
    """The tfds builder of a prepared data set. field, alternatives: for errors, what asks for it and what else it accepts.

    Raises NotPreparedError, or ConfigError for an unknown name, config or version and for damaged metadata.
    """
    import tensorflow_datasets as tfds

    root, base = Path(expand_user(directory or tfds.core.constants.DATA_DIR, "data.directory")), re.split("[/:]", name)[0]
    metadata = [path for depth in ("*", "*/*") if base.isidentifier() for path in root.glob(f"{base}/{depth}/*.json")]
    for path in metadata:
        if not path.is_file():  # tensorflow-datasets would read it and might block forever
            raise ConfigError(field, name, reason=f"{path} is not a regular file", hint="prepare it again")
    infos = [path for path in metadata if path.name == "dataset_info.json"]
    prepared = sorted(f"{info.parents[1].relative_to(root)}:{info.parent.name}" for info in infos)
    hint = f"prepared are {', '.join(prepared)}" if prepared else ""
    try:
        builder = tfds.builder(name, data_dir=directory) if directory else tfds.builder(name)
    except tfds.core.registered.DatasetNotFoundError:
        if prepared:
            raise ConfigError(field, name, reason="no such config or version", hint=hint) from None
        suggestion = nearest(name, [*alternatives, *tfds.list_builders(with_community_datasets=False)])
        question = f"did you mean {suggestion}? " if suggestion else ""
        known = "".join(f"{source}, " for source in alternatives) + "or " * bool(alternatives)
        hint = f"{question}give {known}a data set of tensorflow-datasets, such as imagenette or cifar10"
        hint += ", or give the recipe that registers the name with --config" * bool(alternatives)
        raise ConfigError(field, name, reason="unknown data set", hint=hint) from None
    except Exception as error:  # ImportError, ValueError, AssertionError, ParseError, by data set and damage
        hint = hint or "use --data.source folder --data.directory DIR, with an existing folder of images"
        reason = f"tensorflow-datasets cannot open it: {first_line(error).rstrip('.')}"
        raise ConfigError(field, name, reason=reason, hint=hint) from None
    if not builder.info.splits:
        other = f" ({hint})" if hint else ""
        raise NotPreparedError(
            field,
            name,
            reason=f"not prepared in {builder.data_dir}{other}",
            hint=f"run `jaxdp data prepare {name}`, give its directory with --data.directory, or try synthetic images with "
            "--data.source synthetic",
        )
    return builder


def prepare(name: str, directory: str | None = None, manual_directory: str | None = None) -> str:
    """Download a data set and prepare it as array_record; returns the directory of its files. Prepared data are left unchanged.

    manual_directory: where archives lie that must be downloaded by hand. Raises ConfigError where the data set cannot be
    prepared, naming what is missing.
    """
    import importlib.util

    import tensorflow_datasets as tfds

    for flag, path in (("--directory", directory), ("--manual-directory", manual_directory)):
        check_local(path or "", flag)
    directory, manual_directory = (path and expand_user(path, "directory") for path in (directory, manual_directory))
    if not SOURCES[name].prepared:
        hint = "give a data set of tensorflow-datasets"
        raise ConfigError("NAME", name, reason="this source needs no preparation", hint=hint)
    try:
        return str(open_builder(name, directory, field="NAME", alternatives=()).data_dir)
    except NotPreparedError:
        pass
    if importlib.util.find_spec("tensorflow") is None:
        hint = "pip install -e '.[prepare]', or prepare it on another machine and copy the directory"
        reason = "TensorFlow is missing, which preparation needs and training does not"
        raise ConfigError("NAME", name, reason=reason, hint=hint)
    builder = tfds.builder(name, file_format="array_record", **({"data_dir": directory} if directory else {}))
    folder = Path(manual_directory or Path(builder.data_dir).parents[1] / "downloads/manual")
    if missing := [file for file in ARCHIVES.get(builder.name, ()) if not (folder / file).exists()]:
        hint = "download what is missing by hand, and give --manual-directory"
        raise ConfigError("NAME", name, reason=f"{', '.join(missing)} not found in {folder}", hint=hint)
    options = tfds.download.DownloadConfig(manual_dir=manual_directory)
    try:
        builder.download_and_prepare(download_config=options)
    except Exception as error:  # no network, no space, a changed checksum, ..., by data set and release
        raise ConfigError("NAME", name, reason=f"{type(error).__name__}: {first_line(error)}") from None
    return str(builder.data_dir)
