"""Configs for data sets at URLs, with their local copies in a directory of a test."""

import dataclasses
from pathlib import Path

from jaxdp.config import Storage


def at_url(config, url, cache: Path, gigabytes=1.0):
    """The config with its data at a URL."""
    data = dataclasses.replace(config.data, directory=str(url))
    return dataclasses.replace(config, data=data, storage=Storage(directory=str(cache), cache_gigabytes=gigabytes))


def upload(folder: Path, storage, prefix: str) -> str:
    """Write the files of a folder to a server; returns their URL."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            storage.direct.pipe_file(f"bucket/{prefix}/{file.relative_to(folder)}", file.read_bytes())
    return f"{storage.url}/{prefix}"
