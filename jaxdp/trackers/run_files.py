"""The files of a run that concern trackers: which run of a tracker it is, its pictures, and the facts that are sent."""

import fcntl
import json
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxdp.checkpoint.listing import read_manifests
from jaxdp.files import CHECKPOINTS, CONFIG, open_regular, read_text, write_atomically
from jaxdp.trackers.client import RunFacts
from jaxdp.validation import flatten

FOLDER = "trackers"  # in the run directory
PICTURE = "held_out-{}.png"  # samples of the evaluation


class TrackerState:
    """The identity of a run in one tracker, in a file of the run directory.

    target: the project or server. The file holds it, a random id, chosen before anything is sent, and whether the tracker
    has the complete run with its result.
    """

    def __init__(self, workdir: Path, tracker: str, target: str) -> None:
        self.path, self.target = workdir / FOLDER / f"{tracker}.json", target
        try:
            saved = json.loads(read_text(self.path))
        except (OSError, ValueError):
            saved = None
        is_valid = isinstance(saved, dict) and isinstance(saved.get("id"), str) and saved.get("target") == target
        self.fields: dict[str, Any] = saved if is_valid else {}

    @property
    def exists(self) -> bool:
        """Whether the run has been sent to this target before."""
        return bool(self.fields)

    @property
    def complete(self) -> bool:
        return self.fields.get("complete") is True

    def identify(self) -> str:
        """The run's id for this target; a new one is on the disk before it is returned."""
        if not self.fields:
            self.fields = {"id": secrets.token_hex(4), "target": self.target}
            self._write()
        return self.fields["id"]

    def set_complete(self, complete: bool) -> None:
        if complete != self.complete:
            self.fields["complete"] = complete
            self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        write_atomically(self.path, json.dumps(self.fields) + "\n", sync=True)


@contextmanager
def exclusive(workdir: Path, tracker: str) -> Iterator[None]:
    """Wait until no other process sends this run to the tracker: that of a killed session may take seconds to end."""
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    with open_regular(folder / f".{tracker}.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def picture_path(workdir: Path, samples: int) -> Path:
    return workdir / FOLDER / PICTURE.format(samples)


def pictures(workdir: Path) -> dict[int, Path]:
    """Pictures of held-out examples, by samples of their evaluation."""
    before, _, after = PICTURE.partition("{}")
    found = {}
    for path in (workdir / FOLDER).glob(PICTURE.format("*")):
        number = path.name.removeprefix(before).removesuffix(after)
        if number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def run_facts(workdir: Path, url: str | None = None) -> RunFacts:
    """The facts of the run in a directory, as its files state them now. url: of the run whose local copy this is."""
    config = json.loads(read_text(workdir / CONFIG))
    result: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        result = json.loads(read_text(workdir / "result.json"))
    result["bad_images"] = len(result.get("bad_images", ())) or None  # how many; their names are in the file
    manifest = next(read_manifests(workdir / CHECKPOINTS), None)
    if url is not None and "workdir" in result:
        result["workdir"] = url
    plot = workdir / "training.png"
    return RunFacts(
        name=config["name"],
        config=flatten(config),
        directory=url or str(workdir),
        host=socket.gethostname(),
        checkpoint=f"{url or workdir}/{CHECKPOINTS}/{manifest.samples}" if manifest else None,
        result={name: value for name, value in flatten(result).items() if value is not None},
        pictures=pictures(workdir),
        plot=plot if plot.is_file() else None,
    )
