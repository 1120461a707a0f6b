"""The data source `folder`: images in DIRECTORY/SPLIT/CLASS/, on a disk or at a URL."""

from pathlib import Path
from typing import Protocol

from jaxdp.config import Config
from jaxdp.data.datasets import EncodedItems, FileSource, stated_classes
from jaxdp.data.image_folder import EVALUATION_NAMES, LocalSplits, missing_evaluation_split
from jaxdp.files import is_url


class Splits(Protocol):
    """The splits of a data set of folders."""

    @property
    def place(self) -> str:
        """Its directory or URL."""
        ...

    def names(self) -> list[str]:
        """The folders in it. Raises ConfigError."""

    def has(self, name: str) -> bool:
        """Whether there is a split of this name."""

    def open(self, name: str, classes: list[str] | None = None) -> EncodedItems:
        """The encoded images of a split, ordered by class and name. classes: of the training split, which this one must have.

        Raises ConfigError for a folder that is missing or cannot be read, and for empty, missing or additional classes.
        """


class Folder(FileSource):
    """Folders of images. The classes of the training split are those of the evaluation split."""

    def size(self, config: Config) -> tuple[int, int | None]:
        """See `Source.size`; opens the evaluation split too, to raise what a run would."""
        (_, train), _ = self.splits(config)
        return len(train), stated_classes(train)

    def split(self, config: Config, name: str) -> EncodedItems:
        """See `FileSource.split`."""
        return _splits(config).open(name)

    def splits(self, config: Config) -> list[tuple[str, EncodedItems]]:
        """See `FileSource.splits`."""
        splits, train_name = _splits(config), config.data.train_split
        train, name = splits.open(train_name), _evaluation_name(config, splits)
        return [(train_name, train), (name, splits.open(name, _classes(train)))]

    def evaluation_split(self, config: Config) -> EncodedItems:
        """See `FileSource.evaluation_split`."""
        splits, train_name = _splits(config), config.data.train_split
        classes = _classes(splits.open(train_name)) if splits.has(train_name) else None
        return splits.open(_evaluation_name(config, splits), classes)


def _splits(config: Config) -> Splits:
    directory = config.data.directory or ""
    if not is_url(directory):
        return LocalSplits(Path(directory))
    from jaxdp.data.remote import open_remote  # and the client of object storage, which a local disk does not need
    from jaxdp.data.remote_folder import RemoteSplits

    return RemoteSplits(open_remote(config))


def _classes(images: EncodedItems) -> list[str]:
    assert isinstance(images.classes, list)
    return images.classes


def _evaluation_name(config: Config, splits: Splits) -> str:
    """The evaluation split: that of the config, or the first of EVALUATION_NAMES that exists."""
    name = config.data.eval_split or next((name for name in EVALUATION_NAMES if splits.has(name)), None)
    if name is None:
        raise missing_evaluation_split(splits.place, splits.names())
    return name
