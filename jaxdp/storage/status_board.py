"""Status files of a run at a URL, whose processes share no directory."""

from jaxdp.distributed.status_files import FOLDER
from jaxdp.storage.location import ObjectNotFoundError, open_location


class Folder:
    """A `Board` of `jaxdp.distributed.status_files`. Requests cost time and money, so there are fewer than in a directory."""

    period_seconds, poll_seconds = 2.0, 0.5

    def __init__(self, url: str) -> None:
        self.location, self.name = open_location(url, "--workdir"), f"{url}/{FOLDER}"

    def write(self, name: str, text: str) -> None:
        self.location.write(f"{FOLDER}/{name}", text.encode())

    def read(self, name: str) -> str | None:
        try:
            return self.location.read(f"{FOLDER}/{name}").decode(errors="replace")
        except ObjectNotFoundError:
            return None
