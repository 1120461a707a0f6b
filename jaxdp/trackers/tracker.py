"""The callback that starts a process for each tracker, sends it the outcome of the session, and never waits for long."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdp.config import Config
from jaxdp.distributed.signal_handler import ForcedStop, Stopped, StopTraining
from jaxdp.errors import EXIT_CONFIG, ConfigError, first_line, printable
from jaxdp.files import write_atomically
from jaxdp.loggers.example_grid import example_grid
from jaxdp.trackers.run_files import FOLDER, TrackerState, picture_path, write_origin
from jaxdp.trackers.sender import Task
from jaxdp.training.callback import Callback
from jaxdp.training.run import Run

CLIENTS = {"wandb": "jaxdp.trackers.wandb_client:WandbClient", "mlflow": "jaxdp.trackers.mlflow_client:MlflowClient"}
CONNECT_SECONDS = 10.0  # to wait for an answer before training
END_SECONDS = 30.0  # to wait for the last points of a finished run
CHECKPOINT_SECONDS = 600.0  # the same, if a checkpoint is sent
QUIET_SECONDS = 2.0  # of such a wait, without a message
STOP_SECONDS = 5.0  # the same after a stop signal or an error, when a scheduler may be about to kill the process


def check_packages(config: Config) -> None:
    """Raise ConfigError if the package of a tracker is not installed. Does not import it."""
    for name in CLIENTS:
        target = getattr(config.logging, name)
        spec = importlib.util.find_spec(name) if target is not None else None
        if target is not None and (spec is None or spec.origin is None):  # no origin: a directory of that name
            hint = f"pip install -e '.[{name}]', or omit it"
            raise ConfigError(f"logging.{name}", target, reason=f"the package {name} is not installed", hint=hint)


def trackers_of(config: Config) -> "Trackers":
    """The trackers that a configuration names."""
    targets = {name: getattr(config.logging, name) for name in CLIENTS}
    if os.environ.get("WANDB_MODE") == "disabled":
        targets["wandb"] = None
    seconds = CHECKPOINT_SECONDS if config.logging.send_checkpoint else END_SECONDS
    return Trackers([Tracker(name, target) for name, target in targets.items() if target is not None], end_seconds=seconds)


class Trackers(Callback):
    """Sends the run to trackers; attached on rank 0, before the log, because readers of the log need the pictures.

    end_seconds: how long to wait for the last points of a finished run. All trackers get the outcome before the wait, which is
    for all of them together.
    """

    def __init__(self, trackers: Sequence["Tracker"], *, end_seconds: float = END_SECONDS) -> None:
        self.trackers, self.end_seconds, self._can_draw = trackers, end_seconds, True

    def on_start(self, run: Run) -> None:
        def while_waiting() -> str | None:
            run.processes.status.record_progress()  # waiting for a tracker is not a hang
            return run.signals.stop_reason

        if self.trackers:
            run.processes.set_activity("start", detail=f"connecting to {_names(self.trackers)}")
            write_origin(run.workdir)
            self.start(run.workdir, run.location, info=run.info, while_waiting=while_waiting)

    def start(
        self,
        workdir: Path,
        location: str,
        *,
        info: Callable[[str], Any],
        while_waiting: Callable[[], Any] = lambda: None,
    ) -> None:
        """Start the processes, and wait for a short time until they have opened their runs.

        location: of the run, a directory or a URL. while_waiting: called ten times a second during waits; a true value ends
        the wait. Raises ConfigError if a tracker rejects a new run.
        """
        self.info, self.while_waiting = info, while_waiting
        for tracker in self.trackers:
            tracker.start(workdir, location, info=info)
        self._wait(CONNECT_SECONDS, while_waiting, lambda tracker: tracker.has_answered)
        for tracker in self.trackers:
            if tracker.rejection and tracker.is_new:
                tracker.close()
                raise tracker.rejection
            if tracker.rejection:
                info(f"{tracker.rejection}; training continues without it")
            elif tracker.is_running and not tracker.has_answered:
                info(f"{tracker.name}: no answer within {CONNECT_SECONDS:g} s; training continues")

    def after_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        if not self.trackers or not run.example_images or not self._can_draw:
            return
        png = io.BytesIO()
        try:
            from PIL import Image

            Image.fromarray(example_grid(*run.example_images, class_names=run.datasets.classes)).save(png, "png")
        except Exception as error:
            self._can_draw = False
            reason = printable(f"{type(error).__name__}: {first_line(error)}")
            run.info(f"held-out images cannot be drawn for {_names(self.trackers)} ({reason}); training continues without them")
            return
        with contextlib.suppress(OSError):  # with a full disk, the picture is lost
            write_atomically(picture_path(run.workdir, evaluation["samples"]), png.getvalue())

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """End the processes after the block, with an outcome that depends on its exception."""
        try:
            yield
        except ForcedStop:
            self.abandon()
            raise
        except (Stopped, StopTraining):
            self.finish("stopped")
            raise
        except BaseException:
            self.finish("failed")
            raise
        self.finish("finished")

    def abandon(self) -> None:
        """Close the input of the processes, which then end within seconds."""
        for tracker in self.trackers:
            tracker.close()

    def finish(self, outcome: str) -> None:
        """Send the outcome of the session to the processes, and wait for a limited time until everything has arrived."""
        told = [tracker for tracker in self.trackers if tracker.close(outcome)]
        try:
            if told and outcome == "finished":
                self._wait(QUIET_SECONDS, self.while_waiting)
                if late := [tracker for tracker in told if tracker.is_running]:
                    until = f"waiting at most {self.end_seconds:g} s for {_names(late)} to receive the last points"
                    self.info(f"{until}; Ctrl-C skips this")
                    self._wait(self.end_seconds - QUIET_SECONDS, self.while_waiting)
            elif told:
                self._wait(STOP_SECONDS, lambda: False)  # waits despite the stop signal
        finally:
            for tracker in told:
                tracker.kill()

    def send_finished(
        self, workdir: Path, location: str, *, info: Callable[[str], Any], while_waiting: Callable[[], Any] = lambda: None
    ) -> None:
        """Send what the trackers lack of an already finished run. For the arguments, see `start`."""
        self.trackers = [tracker for tracker in self.trackers if not tracker.state(workdir).complete]
        with self.ended():
            self.start(workdir, location, info=info, while_waiting=while_waiting)
        for tracker in self.trackers:
            if tracker.state(workdir).complete:
                info(f"{tracker.name}: everything has arrived")

    def _wait(
        self, seconds: float, while_waiting: Callable[[], Any], is_over: Callable[["Tracker"], bool] = lambda _: False
    ) -> None:
        """Wait until each process has ended or `is_over`, `while_waiting` returns true, or the time is over."""
        deadline = time.monotonic() + seconds
        for tracker in self.trackers:
            while tracker.is_running and not is_over(tracker) and time.monotonic() < deadline and not while_waiting():
                tracker.reader.join(0.1)


class Tracker:
    """The process that sends the run to one tracker. target: the project or server."""

    def __init__(self, name: str, target: str) -> None:
        self.name, self.target = name, target
        self.process: subprocess.Popen[bytes] | None = None  # until its input is closed
        self.rejection: ConfigError | None = None
        self.is_new = self.has_answered = self._is_killed = False
        self.reader = threading.Thread()  # of what the process prints

    def state(self, workdir: Path) -> TrackerState:
        """What the directory of a run holds about this tracker."""
        return TrackerState(workdir, self.name, self.target)

    def start(self, workdir: Path, location: str, *, info: Callable[[str], Any]) -> None:
        """Start the process; see `Trackers.start`."""
        self.info, self.log = info, workdir / FOLDER / f"{self.name}.log"
        self.is_new = not self.state(workdir).exists
        path = os.path.abspath(workdir)
        task = Task(self.name, CLIENTS[self.name], self.target, path, path if location == str(workdir) else location)
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
        self.started = self.process
        self.reader = threading.Thread(target=self._show_lines, args=[self.process], name=self.name, daemon=True)
        self.reader.start()

    @property
    def is_running(self) -> bool:
        """True until the process has ended and its lines are shown."""
        return self.reader.is_alive()

    def close(self, outcome: str = "") -> bool:
        """Send the process the outcome of the session, if any, and close its input; False if the input was closed before."""
        process, self.process = self.process, None
        if process is None:
            return False
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin as outcomes:  # OSError: it has ended
            if outcome:
                outcomes.write(f"{outcome}\n".encode())
        return True

    def kill(self) -> None:
        """Kill the process and all that it has started, and report it if the process was not done."""
        self._is_killed = True
        with contextlib.suppress(OSError):
            os.killpg(self.started.pid, signal.SIGKILL)
        self.reader.join()
        if self.started.returncode != 0:
            self.info(f"{self.name}: not everything has arrived; the same command sends the rest")

    def _show_lines(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._show(line.decode(errors="replace").rstrip("\n"))
        code = process.wait()
        if code not in (0, EXIT_CONFIG) and not self._is_killed:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.info(f"{self.name}: its process has ended ({how}, see {self.log}); training continues without it")

    def _show(self, line: str) -> None:
        word, *rest = line.split("\t")
        if word == "rejected":
            self.rejection = ConfigError(f"logging.{self.name}", self.target, reason=rest[0], hint=rest[1])
        else:
            self.info(f"{self.name}: {line}")
        self.has_answered = True


def _names(trackers: Sequence[Tracker]) -> str:
    return " and ".join(tracker.name for tracker in trackers)
