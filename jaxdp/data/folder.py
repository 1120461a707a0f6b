"""The data source `folder`: images in DIRECTORY/SPLIT/CLASS/, on a disk or at a URL."""

import os
from pathlib import Path

from jaxdp.config import Config
from jaxdp.data import progress
from jaxdp.data.datasets import HOLDOUT_HINT, FileSource, SplitReader, has_splits
from jaxdp.data.image_folder import ImageFolder
from jaxdp.errors import ConfigError
from jaxdp.files import is_url

LAYOUT_HINT = f"arrange images as train/CLASS/IMAGE and val/CLASS/IMAGE, or {HOLDOUT_HINT}"


class Folder(FileSource):
    """Folders of images, on a disk or at a URL."""

    def data_set(self, config: Config) -> SplitReader:
        directory = config.data.directory or ""
        if not is_url(directory):
            return LocalFolders(Path(directory))
        from jaxdp.cloud.remote_folder import RemoteFolders
        from jaxdp.cloud.source import RemoteData  # and the client of object storage, which a local disk does not need

        return RemoteFolders(RemoteData(directory, config.storage, progress.report))


class LocalFolders(SplitReader):
    """Splits that are folders on a disk. The evaluation split has the classes of the training split."""

    matches_classes = True

    def __init__(self, root: Path) -> None:
        self.root, self.place = root, str(root)

    def names(self) -> list[str]:
        try:
            return [entry.name for entry in os.scandir(self.root) if entry.is_dir()]
        except OSError as error:
            hint = "give the folder of the images; a relative path starts in the current directory"
            raise ConfigError("data.directory", self.place, reason=error.strerror or str(error), hint=hint) from None

    def undivided(self, train: str) -> ImageFolder | None:
        return None if has_splits(self.names(), train) else ImageFolder.open(self.root)

    def open(self, name: str, classes: list[str] | None = None) -> ImageFolder:
        if (self.root / name).is_dir():
            return ImageFolder.open(self.root / name, classes)
        hint = ", or ".join(filter(None, (self.no_split(name).hint, LAYOUT_HINT)))
        if (self.root.parent / name).is_dir():
            hint = f"use --data.directory {self.root.parent}"
        raise ConfigError("data.directory", self.place, reason=f"it has no folder {name!r}", hint=hint)
