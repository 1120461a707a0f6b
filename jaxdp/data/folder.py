"""The data source `folder`: images in DIRECTORY/SPLIT/CLASS/, on a disk or at a URL."""

from pathlib import Path

from jaxdp.config import Config
from jaxdp.data import progress
from jaxdp.data.datasets import FileSource, Splits
from jaxdp.data.image_folder import LocalFolders
from jaxdp.files import is_url


class Folder(FileSource):
    """Folders of images. The classes of the training split are those of the evaluation split."""

    def data_set(self, config: Config) -> Splits:
        """See `FileSource.data_set`."""
        directory = config.data.directory or ""
        if not is_url(directory):
            return LocalFolders(Path(directory))
        from jaxdp.cloud.source import Source  # and the client of object storage, which a local disk does not need
        from jaxdp.data.remote_folder import RemoteFolders

        return RemoteFolders(Source(directory, config.storage, progress.report))
