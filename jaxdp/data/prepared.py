"""Data sources of tensorflow-datasets: data sets that it has prepared, on a disk or at a URL."""

from jaxdp.choices import SOURCES
from jaxdp.config import Config
from jaxdp.data.datasets import FileSource, stated_classes
from jaxdp.data.image_folder import EVALUATION_NAMES
from jaxdp.data.tfds import Copies, TfdsSource, open_builder
from jaxdp.errors import ConfigError
from jaxdp.files import is_url


class Prepared(FileSource):
    """A data set of tensorflow-datasets, by its name there."""

    def size(self, config: Config) -> tuple[int, int | None]:
        """See `Source.size`; a published size is known without the data."""
        data, published = config.data, SOURCES[config.data.source]
        if published.train_images is not None and data.train_split == "train" and data.directory is None:
            return published.train_images, published.classes
        train = self.split(config, data.train_split)
        return len(train), stated_classes(train)

    def split(self, config: Config, name: str) -> TfdsSource:
        """See `FileSource.split`."""
        return _open(config, _copies(config), name)

    def splits(self, config: Config) -> list[tuple[str, TfdsSource]]:
        """See `FileSource.splits`."""
        copies, train_name = _copies(config), config.data.train_split
        train = _open(config, copies, train_name)
        name = _evaluation_name(config, train.splits)
        return [(train_name, train), (name, _open(config, copies, name))]

    def evaluation_split(self, config: Config) -> TfdsSource:
        """See `FileSource.evaluation_split`."""
        data, copies = config.data, _copies(config)
        builder = open_builder(data.source, str(copies.directory) if copies else data.directory)
        return _open(config, copies, _evaluation_name(config, tuple(builder.info.splits)))


def _copies(config: Config) -> Copies | None:
    """The data set if it is at a URL."""
    if not is_url(config.data.directory or ""):
        return None
    from jaxdp.data.remote import open_remote  # and the client of object storage, which a local disk does not need
    from jaxdp.data.remote_prepared import RemotePrepared

    return RemotePrepared(open_remote(config), config.data.source)


def _open(config: Config, copies: Copies | None, split: str) -> TfdsSource:
    field = "data.train_split" if split == config.data.train_split else "data.eval_split"
    return TfdsSource.open(config.data.source, config.data.directory, split, field=field, prepared=copies)


def _evaluation_name(config: Config, splits: tuple[str, ...]) -> str:
    """The evaluation split: that of the config, or the first of EVALUATION_NAMES that exists."""
    name = config.data.eval_split or next((name for name in EVALUATION_NAMES if name in splits), None)
    if name is None:
        reason = f"{config.data.source} has only the splits {', '.join(splits)}"
        raise ConfigError("data.eval_split", None, reason=reason, hint="give one, for example train[90%:]")
    return name
