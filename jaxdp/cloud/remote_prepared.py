"""Data sets of tensorflow-datasets at a URL: their metadata, and copies of whole files."""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxdp.cloud.location import ObjectInfo
from jaxdp.cloud.source import RemoteData
from jaxdp.errors import ConfigError
from jaxdp.files import write_atomically

SHARD = re.compile(r"-\d{5,}-of-\d{5,}$")


class RemotePrepared:
    """A prepared data set at a URL, all configs and versions.

    url: of the data set. directory: local directory with its metadata, which tensorflow-datasets opens like one with the whole
    data set. objects: of all files, by name relative to the URL. urls: the URLs of the copies, by path.
    """

    def __init__(self, remote: RemoteData, name: str) -> None:
        """name: as for tensorflow-datasets. Raises ConfigError if it is not at the URL."""
        self.remote, self.url, base = remote, remote.location.url, re.split("[/:]", name)[0]
        self.urls: dict[str, str] = {}
        with remote.opening():
            folders, _ = remote.ask(lambda location: location.list_folder())
            if base not in folders:
                reason = f"not found at {remote.url}, which has {', '.join(folders) or 'no folders'}"
                hint = "copy the folder of a prepared data set there, as docs/data.md shows"
                raise ConfigError("data.source", name, reason=reason, hint=hint)
            self.objects = remote.list_below([base])
            metadata = {name: info for name, info in self.objects.items() if not SHARD.search(name)}
            digest = hashlib.sha256(repr(sorted(metadata.items())).encode()).hexdigest()[:24]
            self.directory = remote.cache.path / "metadata" / digest
            remote.each(lambda name: self._copy(name, metadata[name]), list(metadata))

    def _copy(self, name: str, info: ObjectInfo) -> None:
        path = self.directory / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, self.remote.ask(lambda location: self.remote.read_checked(location, name, info)))

    def object_of(self, path: str | Path) -> tuple[str, ObjectInfo]:
        """(name, information) of a file of the data set. path: below `directory`. Raises ConfigError if there is none."""
        name = os.path.relpath(path, self.directory)
        if name not in self.objects:
            raise ConfigError("data.directory", self.remote.url_of(name), reason="file not found", hint="prepare it again")
        return name, self.objects[name]

    def copied(self, instructions: Sequence[Any]) -> list[Any]:
        """tensorflow-datasets' instructions, changed to local copies of all of their files. The copies are made first.

        Raises ConfigError if the copies do not fit in the cache or on the disk.
        """
        objects = dict(self.object_of(file.filename) for file in instructions)
        gigabytes, limit = sum(info.size for info in objects.values()) / 1e9, self.remote.limit / 1e9
        if missing := sum(info.size for name, info in objects.items() if self.remote.cache.file(name, info) is None):
            self.remote.notice(f"copying {missing / 1e9:,.1f} GB from {self.url} to {self.remote.cache.path}")
        with self.remote.opening():
            paths = dict(zip(objects, self.remote.each_file(objects), strict=True))
        if None in paths.values():
            raise ConfigError(
                "storage.cache_gigabytes",
                limit,
                reason=f"files of {gigabytes:,.1f} GB are copied before they are read, and there is no room for them",
                hint="give more, free the disk, or use a folder of images, which is read in parts",
            )
        self.urls |= {str(path): self.remote.url_of(name) for name, path in paths.items()}
        return [replace(file, filename=str(paths[self.object_of(file.filename)[0]])) for file in instructions]
