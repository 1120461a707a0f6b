"""The files of a run that concern trackers: the identity of the tracker's run, records, pictures, and other facts."""

import fcntl
import json
import math
import random
import re
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxdp import locks
from jaxdp.checkpoint.listing import named_checkpoints, read_manifests
from jaxdp.files import CHECKPOINTS, CONFIG, PASSWORD, RESULT, SECRET, open_regular, read_text, write_atomically
from jaxdp.validation import flatten

FOLDER = "trackers"  # in the run directory
LINES = 500  # records that are sent together
NO_POINT = -1  # position before the first record
LAST = 2  # added to the position of a run's last step: the position of the point that shows the result
ORIGIN = "origin.json"  # host, command and commit of the last session that trained
SECRET_VALUE = re.compile(rf"((?:{SECRET})[^\s:=]*[\s:=]).*", re.IGNORECASE | re.DOTALL)


class Unavailable(Exception):
    """The tracker does not answer now."""


class Rejected(Exception):
    """The tracker cannot be used with its name or setup. hint: how to fix it."""

    def __init__(self, reason: str, hint: str) -> None:
        self.reason, self.hint = reason, hint
        super().__init__(f"{reason}; {hint}")


def is_evaluation(record: dict[str, Any]) -> bool:
    return "eval_accuracy" in record


def position(record: dict[str, Any]) -> int:
    """The number of a record in the order of the log, the same whenever a resumed run writes it again.

    An evaluation comes after the step with the same samples.
    """
    return 3 * record["samples"] + is_evaluation(record)


def values(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record under training/ or evaluation/. null, the log's value for NaN and infinity, becomes NaN."""
    group = "evaluation" if is_evaluation(record) else "training"
    return {
        encodable(f"{group}/{name.removeprefix('eval_')}"): math.nan if value is None else value
        for name, value in record.items()
        if value is None or isinstance(value, (int, float))
    }


def next_records(log: IO[bytes]) -> list[dict[str, Any]]:
    """The next complete records of a log that grows, at most `LINES`. Damaged lines are left out."""
    records: list[dict[str, Any]] = []
    while len(records) < LINES and (line := log.readline()):
        if not line.endswith(b"\n"):  # it is being written
            log.seek(-len(line), 1)
            break
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("samples"), int):
                records.append(record)
    return records


class TrackerState:
    """The identity of a run in one tracker, in a file of the run directory.

    target: the project or server. The file holds the target, a random id (chosen before anything is sent), and whether the
    tracker has the complete run with its result.
    """

    def __init__(self, workdir: Path, tracker: str, target: str) -> None:
        self.path, self.target = workdir / FOLDER / f"{tracker}.json", target
        saved: Any = None
        with suppress(OSError, ValueError):
            saved = json.loads(read_text(self.path))
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
    """Wait until no other process sends this run to the tracker: a killed session's process may take seconds to end."""
    path = workdir / FOLDER / f".{tracker}.lock"
    with ExitStack() as stack:
        try:
            locks.lock(stack.enter_context(open_regular(path, "ab")), fcntl.LOCK_EX, path)
        except locks.NoLocksError:
            while not stack.enter_context(locks.hold_record(path.with_suffix(".in_use"))):
                time.sleep(random.uniform(0.5, 1.5) * locks.REFRESH_SECONDS)  # two that begin together both give way
        yield


def picture_path(workdir: Path, samples: int) -> Path:
    """The picture of held-out examples at an evaluation."""
    return workdir / FOLDER / f"held_out-{samples}.png"


def command_line(words: Sequence[str]) -> str:
    """A command as one line, without passwords in URLs and without the text after a secret's name."""
    shown: list[str] = []
    for word in words:
        after_flag = bool(shown) and shown[-1].startswith("-") and "=" not in shown[-1]
        after_secret = after_flag and re.search(SECRET, shown[-1], re.IGNORECASE)
        shown.append("..." if after_secret else PASSWORD.sub(r"\1...@", SECRET_VALUE.sub(r"\1...", word)))
    return shlex.join(shown)


def git_commit() -> str | None:
    """The commit of the current directory's checkout, with "+changes" for changed files; None outside of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]  # no lock that would stop a command of the user
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + "+changes" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None


def encodable(text: str) -> str:
    """Text with backslash escapes in place of bytes that are not UTF-8, which file names may contain."""
    return text.encode(errors="backslashreplace").decode()


def write_origin(workdir: Path) -> None:
    """Store the host, the command and the commit of this session, which trains the run, in the run directory."""
    origin = {"host": socket.gethostname(), "command": command_line(sys.orig_argv), "commit": git_commit() or ""}
    with suppress(OSError):  # a full disk
        (workdir / FOLDER).mkdir(exist_ok=True)
        write_atomically(workdir / FOLDER / ORIGIN, json.dumps(origin) + "\n")


def read_origin(workdir: Path) -> dict[str, str]:
    """What the last session that trained the run stored; empty if it had no tracker."""
    with suppress(OSError, ValueError):
        saved = json.loads(read_text(workdir / FOLDER / ORIGIN))
        if isinstance(saved, dict):
            return {name: str(saved.get(name, "")) for name in ("host", "command", "commit")}
    return {}


class RunFacts(NamedTuple):
    """What a tracker shows about a run besides its log.

    config: all fields by dotted name. about: directory and, if known, host, command, commit and newest checkpoint; paths are
    absolute, or URLs of a run at a URL. result: fields of result.json by dotted name; empty before the end. best: the directory
    of the best checkpoint, if it is to be sent.
    """

    name: str
    config: dict[str, Any]
    about: dict[str, str]
    result: dict[str, Any]
    plot: Path | None
    best: Path | None


def run_facts(workdir: Path, location: str) -> RunFacts:
    """The facts of the run in a directory, from its current files. location: the directory, or the URL of the run."""
    config = json.loads(read_text(workdir / CONFIG))
    result: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        result = json.loads(read_text(workdir / RESULT)) | {"workdir": encodable(location)}
    result["bad_images"] = len(result.get("bad_images", ())) or None  # how many; their names are in the file
    manifests = list(read_manifests(workdir / CHECKPOINTS))
    checkpoint = f"{location}/{CHECKPOINTS}/{manifests[0].samples}" if manifests else ""
    about = read_origin(workdir) | {"directory": location, "checkpoint": checkpoint}
    config, plot = flatten(config), workdir / "training.png"
    best: Path | None = None
    if config.get("logging.send_checkpoint") and result and manifests:
        names = named_checkpoints(manifests, config["stop.metric"])
        best = workdir / CHECKPOINTS / str(names.get("best", names["newest"]))
    return RunFacts(
        name=config["name"],
        config=config,
        about={name: encodable(text) for name, text in about.items() if text},
        result={name: value for name, value in flatten(result).items() if value is not None},
        plot=plot if plot.is_file() else None,
        best=best,
    )
