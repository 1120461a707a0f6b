"""Beside the run: a callback that starts the process of a tracker, tells it how the session ends, and never waits for long."""

import contextlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxdp.config import Config
from jaxdp.distributed.preemption import ForcedStop, Stopped, StopTraining
from jaxdp.errors import EXIT_CONFIG, ConfigError
from jaxdp.files import write_atomically
from jaxdp.loggers.example_grid import example_grid
from jaxdp.trackers.run_files import FOLDER, TrackerState, command_line, picture_path
from jaxdp.trackers.sender import Task
from jaxdp.training.callback import Callback
from jaxdp.training.result import TrainResult
from jaxdp.training.run import Run

CLIENTS = {"wandb": "jaxdp.trackers.wandb_client:WandbClient", "mlflow": "jaxdp.trackers.mlflow_client:MlflowClient"}
CONNECT_SECONDS = 10.0  # to wait for an answer before training
END_SECONDS = 30.0  # to wait for the last points of a finished run
CHECKPOINT_SECONDS = 600.0  # the same, if a checkpoint is sent
QUIET_SECONDS = 2.0  # of that without a message
STOP_SECONDS = 5.0  # the same after a stop signal or an error, when a scheduler may be about to kill the process


def check_packages(config: Config) -> None:
    """Raise ConfigError if the package of a tracker is not installed. Does not import it."""
    for name in CLIENTS:
        target = getattr(config.logging, name)
        spec = importlib.util.find_spec(name) if target is not None else None
        if target is not None and (spec is None or spec.origin is None):  # without origin: a directory of that name
            hint = f"pip install -e '.[{name}]', or omit it"
            raise ConfigError(f"logging.{name}", target, reason=f"the package {name} is not installed", hint=hint)


def trackers_of(config: Config) -> list["Tracker"]:
    """The trackers that a configuration names."""
    targets = {name: getattr(config.logging, name) for name in CLIENTS}
    if os.environ.get("WANDB_MODE") == "disabled":
        targets["wandb"] = None
    seconds = CHECKPOINT_SECONDS if config.logging.send_checkpoint else END_SECONDS
    return [Tracker(name, target, end_seconds=seconds) for name, target in targets.items() if target is not None]


class Tracker(Callback):
    """Sends the run to a tracker, by a process of its own; attached on rank 0, before the log, whose readers need the pictures.

    target: the project or server. end_seconds: how long to wait for the last points of a finished run.
    """

    def __init__(self, name: str, target: str, *, end_seconds: float = END_SECONDS) -> None:
        self.name, self.target, self.end_seconds = name, target, end_seconds
        self.process: subprocess.Popen[bytes] | None = None

    def on_start(self, run: Run) -> None:
        def while_waiting() -> str | None:
            run.processes.status.record_progress()  # waiting for a tracker is no hang
            return run.signals.stop_reason

        run.processes.set_activity("start", detail=f"connecting to {self.name}")
        self.start(run.workdir, run.location, info=run.info, while_waiting=while_waiting)

    def start(
        self, workdir: Path, location: str, *, info: Callable[[str], Any], while_waiting: Callable[[], Any] = lambda: None
    ) -> None:
        """Start the process, and wait for a short time until it has opened its run.

        location: of the run, a directory or a URL. while_waiting: called ten times a second in waits; a true value ends the
        wait. Raises ConfigError if the tracker rejects a new run.
        """
        self.info, self.while_waiting = info, while_waiting
        self.log = workdir / FOLDER / f"{self.name}.log"
        is_new = not TrackerState(workdir, self.name, self.target).exists
        self.rejection: ConfigError | None = None
        self._answered, self._closing = False, False
        path = os.path.abspath(workdir)
        task = Task(
            self.name,
            CLIENTS[self.name],
            self.target,
            path,
            path if location == str(workdir) else location,
            command_line(sys.orig_argv),
        )
        try:
            self.log.parent.mkdir(exist_ok=True)
            with open(self.log, "wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "jaxdp.trackers.sender", json.dumps(task._asdict())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    bufsize=0,
                )
        except OSError as error:  # such as a full disk
            info(f"{self.name}: its process cannot start ({error}); training continues without it")
            return
        self._reader = threading.Thread(target=self._show_lines, args=[self.process], name=self.name, daemon=True)
        self._reader.start()
        self._wait(CONNECT_SECONDS, lambda: self._answered)
        if self.rejection and is_new:
            self.abandon()
            raise self.rejection
        if self.rejection:
            info(f"{self.rejection}; training continues without it")
        elif self._reader.is_alive() and not self._answered:
            info(f"{self.name}: no answer within {CONNECT_SECONDS:g} s; training continues")

    def after_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        from PIL import Image

        if run.examples:
            png = io.BytesIO()
            Image.fromarray(example_grid(*run.examples, class_names=run.datasets.classes)).save(png, "png")
            with contextlib.suppress(OSError):  # a full disk costs the picture
                write_atomically(picture_path(run.workdir, evaluation["samples"]), png.getvalue())

    def on_end(self, run: Run, result: TrainResult | None) -> None:
        if isinstance(run.error, ForcedStop):
            self.abandon()
        elif result is None:  # of a finished run, the result is not written yet
            self.finish("stopped" if isinstance(run.error, (Stopped, StopTraining)) else "failed")

    def abandon(self) -> None:
        """Close the input of the process, which then ends within seconds, and do not wait."""
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process = None

    def finish(self, outcome: str) -> None:
        """Tell the outcome of the session, and wait for a limited time until everything has arrived."""
        process, self.process = self.process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin as outcomes:  # OSError: it has ended
            outcomes.write(f"{outcome}\n".encode())
        if outcome == "finished":
            self._wait(QUIET_SECONDS)
            if self._reader.is_alive():
                until = f"waiting at most {self.end_seconds:g} s for {self.name} to receive the last points"
                self.info(f"{until}; Ctrl-C skips this")
                self._wait(self.end_seconds - QUIET_SECONDS)
        else:  # the stop signal is no reason not to wait
            self._reader.join(STOP_SECONDS)
        self._closing = True
        with contextlib.suppress(OSError):  # with what it has started
            os.killpg(process.pid, signal.SIGKILL)
        self._reader.join()
        if process.returncode != 0:
            self.info(f"{self.name}: not everything has arrived; the same command sends the rest")

    def send_finished(self, workdir: Path, location: str, **options: Any) -> None:
        """Send what the tracker lacks of a run that has finished before. options: see `start`."""
        if not TrackerState(workdir, self.name, self.target).complete:
            self.start(workdir, location, **options)
            self.finish("finished")
            if TrackerState(workdir, self.name, self.target).complete:
                self.info(f"{self.name}: everything has arrived")

    def _wait(self, seconds: float, is_over: Callable[[], Any] = lambda: False) -> None:
        """Wait until the process ends, `is_over` or `while_waiting` returns true, or the time is over."""
        deadline = time.monotonic() + seconds
        while self._reader.is_alive() and time.monotonic() < deadline and not (is_over() or self.while_waiting()):
            self._reader.join(0.1)

    def _show_lines(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._show(line.decode(errors="replace").rstrip("\n"))
        code = process.wait()
        if code not in (0, EXIT_CONFIG) and not self._closing:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.info(f"{self.name}: its process has ended ({how}, see {self.log}); training continues without it")

    def _show(self, line: str) -> None:
        word, *rest = line.split("\t")
        if word == "rejected":
            self.rejection = ConfigError(f"logging.{self.name}", self.target, reason=rest[0], hint=rest[1])
        else:
            self.info(f"{self.name}: {line}")
        self._answered = True
