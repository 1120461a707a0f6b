"""The data source `folder`: images in DIRECTORY/SPLIT/CLASS/, on a disk or at a URL."""

from pathlib import Path

from jaxdp.config import Config
from jaxdp.data import image_folder, remote_folder
from jaxdp.data.datasets import FileSource, stated_classes
from jaxdp.data.image_folder import ImageFolder
from jaxdp.data.remote import Remote, open_remote
from jaxdp.data.remote_folder import RemoteFolder

Images = ImageFolder | RemoteFolder


class Folder(FileSource):
    """Folders of images. The classes of the training split are those of the evaluation split."""

    def size(self, config: Config) -> tuple[int, int | None]:
        """See `Source.size`; opens the evaluation split too, to raise what a run would."""
        (_, train), _ = self.splits(config)
        return len(train), stated_classes(train)

    def split(self, config: Config, name: str) -> Images:
        """See `FileSource.split`."""
        return _open(config, open_remote(config), name)

    def splits(self, config: Config) -> list[tuple[str, Images]]:
        """See `FileSource.splits`."""
        remote, train_name = open_remote(config), config.data.train_split
        train, name = _open(config, remote, train_name), _evaluation_name(config, remote)
        return [(train_name, train), (name, _open(config, remote, name, classes=train.classes))]

    def evaluation_split(self, config: Config) -> Images:
        """See `FileSource.evaluation_split`."""
        remote, train_name = open_remote(config), config.data.train_split
        has_train = train_name in remote_folder.split_names(remote) if remote else (_root(config) / train_name).is_dir()
        classes = _open(config, remote, train_name).classes if has_train else None
        return _open(config, remote, _evaluation_name(config, remote), classes=classes)


def _root(config: Config) -> Path:
    return Path(config.data.directory or "")


def _open(config: Config, remote: Remote | None, split: str, *, classes: list[str] | None = None) -> Images:
    return RemoteFolder.open(remote, split, classes) if remote else ImageFolder.open(_root(config) / split, classes)


def _evaluation_name(config: Config, remote: Remote | None) -> str:
    requested = config.data.eval_split
    if remote:
        return remote_folder.evaluation_split(remote, requested)
    return image_folder.evaluation_split(_root(config), requested)
