"""What the callbacks of W&B and MLflow share: records of the log go to a thread, which alone calls the tracker's client.

The clients block their caller: with its server suspended, `wandb.init` takes its whole time-out, and so does each request of
MLflow. MLflow's own asynchronous logging delays the end of the process instead (by 199 s for 200 records) and loses the records
of a failed request. A daemon thread does neither.
"""

import importlib
import importlib.util
import json
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxdp.checkpoint.listing import named_checkpoints, read_manifests
from jaxdp.config import Config
from jaxdp.distributed.signal_handler import ForcedStop, Stopped, StopTraining
from jaxdp.errors import ConfigError, first_line, printable
from jaxdp.files import CHECKPOINTS, PASSWORD, read_text, write_atomically
from jaxdp.loggers.example_grid import example_grid
from jaxdp.loggers.origin import describe_origin, encodable
from jaxdp.metrics import is_evaluation
from jaxdp.run_records import LOG, read_log, to_json
from jaxdp.training.callback import Callback
from jaxdp.training.result import TrainResult
from jaxdp.training.run import Run
from jaxdp.validation import flatten
from jaxdp.validation import to_json as config_to_json

FOLDER = "trackers"  # in the run directory: the id of the tracker's run
END_SECONDS, CHECKPOINT_SECONDS = 30.0, 600.0  # to wait for a tracker at the end of a finished run; with its checkpoint
STOP_SECONDS = 10.0  # the same after a stop signal or an error, when a scheduler may be about to kill the process
SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between attempts to reach the tracker
MOST_RECORDS = 100  # that are sent together
NO_POSITION = -1  # before the first record


class Record(NamedTuple):
    """A record of the log. picture: draws the held-out examples of an evaluation, uint8 [H, W, 3]; the thread calls it."""

    values: Mapping[str, Any]
    picture: Callable[[], np.ndarray] | None = None

    @property
    def position(self) -> int:
        """The number of the record in the order of the log, the same when a resumed run repeats it."""
        return 3 * self.values["samples"] + self.is_evaluation

    @property
    def is_evaluation(self) -> bool:
        return is_evaluation(self.values)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers under training/ or evaluation/. null, the log's value for NaN and infinity, becomes NaN."""
        group = "evaluation" if self.is_evaluation else "training"
        return {
            encodable(f"{group}/{name.removeprefix('eval_')}"): math.nan if value is None else value
            for name, value in self.values.items()
            if value is None or isinstance(value, (int, float))
        }


class Ending(NamedTuple):
    """How a session ends. outcome: finished, stopped or failed; only a finished run has a result, and a checkpoint to send."""

    outcome: str
    result: dict[str, Any]
    plot: Path | None = None
    checkpoint: Path | None = None


class Tracker(Callback):
    """Sends a run to a tracker from a thread. Subclasses define `open`, `send` and `close`, which only that thread calls.

    name: of the package and of the config's field. settings: environment of the client, unless the user sets it. place: where a
    person finds the run, once it is open.
    """

    detach_on_error = True
    name: ClassVar[str]
    settings: ClassVar[dict[str, str]]

    def __init__(self, target: str) -> None:
        """target: the project or server."""
        self.target, self.place = target, ""
        self._queue: SimpleQueue[Record | Ending] = SimpleQueue()
        self._batch: list[Record | Ending] = []  # from the queue, not sent yet
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._is_down = self._gave_up = False

    def open(self) -> int:
        """Continue the tracker's run, or create it. Returns the position of the last record that it has."""
        raise NotImplementedError

    def send(self, records: Sequence[Record]) -> None:
        """Add records to the run, in order."""

    def close(self, ending: Ending) -> None:
        """Add the result, and end the tracker's run for this session."""

    def on_start(self, run: Run) -> None:
        for name, value in self.settings.items():
            os.environ.setdefault(name, value)
        with run.processes.status.performing(f"importing {self.name}"):  # in the thread, it would slow the first steps
            importlib.import_module(self.name)
        self._run, self.workdir, self.run_name = run, run.workdir, run.config.name
        self.config: dict[str, Any] = flatten(json.loads(config_to_json(run.config)))
        self.about = describe_origin() | {"directory": encodable(run.location)}
        self.state = self._read_state()
        for record in read_log(run.workdir / LOG) if run.restored else []:  # what an outage before may have left unsent
            self._queue.put(Record(record))
        self._thread.start()

    def after_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if run.is_logged:
            self._queue.put(Record(dict(metrics)))

    def after_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        images, classes = run.example_images, run.datasets.classes
        self._queue.put(Record(dict(evaluation), partial(example_grid, *images, class_names=classes) if images else None))

    def on_end(self, run: Run, result: TrainResult | None) -> None:
        """Wait a limited time until everything is sent, and say what is not."""
        if isinstance(run.error, ForcedStop):
            return
        self._queue.put(self._ending(run, result))
        self._ended.set()
        seconds = CHECKPOINT_SECONDS if run.config.logging.send_checkpoint else END_SECONDS
        seconds = STOP_SECONDS if result is None else seconds
        deadline, stop_reason = time.monotonic() + seconds, run.signals.stop_reason
        run.status(f"waiting at most {seconds:g} s for {self.name}")
        while self._thread.is_alive() and time.monotonic() < deadline and run.signals.stop_reason == stop_reason:
            run.processes.status.record_progress()  # this is no hang
            self._thread.join(0.1)
        if self._thread.is_alive():
            unsent = sum(isinstance(each, Record) for each in self._batch) + self._queue.qsize()
            self._show(f"the end of the run was not sent, with at most {unsent} lines of the log")
        self._gave_up = True

    def _ending(self, run: Run, result: TrainResult | None) -> Ending:
        manifests = list(read_manifests(run.workdir / CHECKPOINTS))
        if manifests:
            self.about["checkpoint"] = encodable(f"{run.location}/{CHECKPOINTS}/{manifests[0].samples}")
        if result is None:
            return Ending("stopped" if isinstance(run.error, (Stopped, StopTraining)) else "failed", {})
        fields = json.loads(to_json(result.to_dict())) | {"workdir": encodable(run.location)}
        fields["bad_images"] = len(result.bad_images) or None  # how many; their names are in the file
        plot, best = run.workdir / "training.png", None
        if run.config.logging.send_checkpoint and manifests:
            names = named_checkpoints(manifests, run.config.deciding_metric)
            best = run.workdir / CHECKPOINTS / str(names.get("best", names["newest"]))
        known = {name: value for name, value in flatten(fields).items() if value is not None}
        return Ending("finished", known, plot if plot.is_file() else None, best)

    def _work(self) -> None:
        pause, last = SHORTEST_PAUSE, None
        while not self._gave_up:
            try:
                if last is None:
                    last = self.open()
                    self._show(self.place)
                    self._is_down, pause = False, SHORTEST_PAUSE
                self._fill_batch()
                new = [each for each in self._batch if isinstance(each, Record) and each.position > last]
                if new:
                    self.send(new)
                    last = new[-1].position
                if isinstance(self._batch[-1], Ending):
                    return self.close(self._batch[-1])
                self._batch = []
            except Exception as error:
                last = None  # ask the tracker what it has
                self._report(error)
                if self._ended.wait(pause):
                    time.sleep(SHORTEST_PAUSE)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _fill_batch(self) -> None:
        """Wait for a record, and take those that follow it."""
        if not self._batch:
            self._batch.append(self._queue.get())
        while len(self._batch) < MOST_RECORDS and not self._queue.empty():
            self._batch.append(self._queue.get())

    def _report(self, error: Exception) -> None:
        """Report once that the tracker does not answer."""
        if not self._is_down:
            self._is_down = True
            self._show(f"no connection ({reason_of(error)}); training continues, and it is tried again")

    def _show(self, line: str) -> None:
        if not self._gave_up:
            self._run.info(PASSWORD.sub(r"\1...@", f"{self.name}: {line}"))

    def _read_state(self) -> dict[str, Any]:
        """{"id", "target"} of the run at this target; an id is on the disk before anything is sent."""
        with suppress(OSError, ValueError):
            saved = json.loads(read_text(self.workdir / FOLDER / f"{self.name}.json"))
            if isinstance(saved, dict) and isinstance(saved.get("id"), str) and saved.get("target") == self.target:
                return saved
        return self.write_state({"id": secrets.token_hex(4), "target": self.target})

    def write_state(self, state: dict[str, Any]) -> dict[str, Any]:
        (self.workdir / FOLDER).mkdir(exist_ok=True)
        write_atomically(self.workdir / FOLDER / f"{self.name}.json", json.dumps(state) + "\n")
        return state


def check_packages(config: Config) -> None:
    """Raise ConfigError if the package of a tracker is not installed. Does not import it."""
    for name in ("wandb", "mlflow"):
        target = getattr(config.logging, name)
        spec = importlib.util.find_spec(name) if target is not None else None
        if target is not None and (spec is None or spec.origin is None):  # no origin: a directory of that name
            hint = f"pip install -e '.[{name}]', or omit it"
            raise ConfigError(f"logging.{name}", target, reason=f"the package {name} is not installed", hint=hint)


def reason_of(error: Exception) -> str:
    """One line about an error of a client; for a failed connection only the cause."""
    text = first_line(error)
    cause = re.search("Connection refused|Connection reset|name resolution|Name or service not known|timed out", text)
    return cause[0].lower() if cause else printable(f"{type(error).__name__}: {text}")
