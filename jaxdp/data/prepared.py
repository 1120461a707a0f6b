"""Data sources of tensorflow-datasets: data sets that it has prepared, on a disk or at a URL."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxdp.choices import SOURCES
from jaxdp.config import Config
from jaxdp.data import progress
from jaxdp.data.datasets import FileSource, Splits, stated_classes
from jaxdp.data.tfds import TfdsSource, open_builder
from jaxdp.errors import ConfigError
from jaxdp.files import is_url

if TYPE_CHECKING:
    from jaxdp.data.remote_prepared import RemotePrepared


class Prepared(FileSource):
    """A data set of tensorflow-datasets, by its name there."""

    def size(self, config: Config) -> tuple[int, int | None]:
        """See `Source.size`; a published size is known without the data."""
        data, published = config.data, SOURCES[config.data.source]
        if published.train_images is not None and data.train_split == "train" and data.directory is None:
            return published.train_images, published.classes
        train = self.data_set(config).describe(data.train_split)
        return len(train), stated_classes(train)

    def data_set(self, config: Config) -> "PreparedSplits":
        """See `FileSource.data_set`."""
        if not is_url(config.data.directory or ""):
            return PreparedSplits(config, None)
        from jaxdp.cloud.source import Source  # and the client of object storage, which a local disk does not need
        from jaxdp.data.remote_prepared import RemotePrepared

        remote = Source(config.data.directory or "", config.storage, progress.report)
        return PreparedSplits(config, RemotePrepared(remote, config.data.source))


@dataclass(frozen=True)
class PreparedSplits(Splits):
    """The splits of a prepared data set, and slices of them such as train[:10%]. remote: the data set, if it is at a URL."""

    config: Config
    remote: "RemotePrepared | None"

    def names(self) -> list[str]:
        directory = str(self.remote.directory) if self.remote else self.config.data.directory
        return list(open_builder(self.config.data.source, directory).info.splits)

    def open(self, name: str, classes: list[str] | None = None) -> TfdsSource:
        source = self.describe(name)
        source.read()
        return source

    def describe(self, name: str) -> TfdsSource:
        """A split whose files have been neither copied nor opened; on a disk, they exist."""
        data = self.config.data
        field = "data.train_split" if name == data.train_split else "data.eval_split"
        return TfdsSource(data.source, data.directory, name, field=field, remote=self.remote)

    def no_evaluation_split(self) -> ConfigError:
        reason = f"{self.config.data.source} has only the splits {', '.join(self.names())}"
        return ConfigError("data.eval_split", None, reason=reason, hint="give one, for example train[90%:]")
