"""Data sets of tensorflow-datasets at a URL: their metadata, and copies of whole files."""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxdp.cloud.objects import ObjectInfo
from jaxdp.cloud.source import Source
from jaxdp.data.records import READERS, Records
from jaxdp.data.remote_records import RemoteArrayRecords
from jaxdp.errors import ConfigError
from jaxdp.files import write_atomically

SHARD = re.compile(r"-\d{5,}-of-\d{5,}$")


class RemotePrepared:
    """A prepared data set at a URL, all configs and versions.

    url: of the data set. directory: local directory with its metadata, which tensorflow-datasets opens like one with the whole
    data set. objects: of all files, by name relative to the URL.
    """

    def __init__(self, remote: Source, name: str) -> None:
        """name: as for tensorflow-datasets. Raises ConfigError if it is not at the URL."""
        self.remote, self.url, base = remote, remote.location.url, re.split("[/:]", name)[0]
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

    def open(self, builder: Any, split: str, instructions: Sequence[Any]) -> Records:
        """The records of a split: single ones of array_record files, or those of copies. Raises ConfigError.

        builder, instructions: of tensorflow-datasets.
        """
        file_format = builder.info.file_format.value
        if file_format == "array_record":
            objects = [self.object_of(file.filename) for file in instructions]
            return RemoteArrayRecords.open(self.remote, builder.info.features, instructions, objects=objects)
        return READERS[file_format].open(builder, split, self.copied(instructions))

    def object_of(self, path: str | Path) -> tuple[str, ObjectInfo]:
        """(name, information) of a file of the data set. path: below `directory`. Raises ConfigError if there is none."""
        name = os.path.relpath(path, self.directory)
        if name not in self.objects:
            raise ConfigError("data.directory", self.remote.url_of(name), reason="file not found", hint="prepare it again")
        return name, self.objects[name]

    def copied(self, instructions: Sequence[Any]) -> list[Any]:
        """tensorflow-datasets' instructions for local copies of all of their files, which are made first.

        Raises ConfigError if the copies do not fit in the cache or on the disk.
        """
        objects = dict(self.object_of(file.filename) for file in instructions)
        size, limit = sum(info.size for info in objects.values()), self.remote.limit
        with self.remote.opening():
            paths = dict(zip(objects, self.remote.each_file(objects), strict=True))
        if None in paths.values():
            raise ConfigError(
                "storage.cache_gigabytes",
                limit / 1e9,
                reason=f"TFRecord files of {size / 1e9:,.1f} GB are copied before they are read, and there is no room for them",
                hint="give more, free the disk, or prepare the data set as array_record, which needs no room",
            )
        return [replace(file, filename=paths[self.object_of(file.filename)[0]]) for file in instructions]
