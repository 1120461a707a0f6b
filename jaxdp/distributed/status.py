"""What this process does: its activity, step and progress, as the run reports them.

No function takes a lock, so that a stuck thread cannot block the one that watches.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

OUTSIDE = "outside"  # the activity before, between and after runs
PHRASES = {  # activity -> where a process is, in a message
    "start": "during start-up",
    "load": "while loading",
    "compile": "during compilation",
    "step": "during a step",
    "audit": "during an audit",
    "evaluate": "during evaluation",
    "save": "while saving",
    "finish": "while finishing",
    OUTSIDE: "outside of a run",
}
KEPT_DURATIONS, MIN_DURATIONS = 20, 5  # iterations whose duration is kept, and how many define a typical one
ITERATION_OF_ACTIVITY = {"load": "step", "step": "step", "audit": "step", "evaluate": "evaluate"}


@dataclass(frozen=True)
class Heartbeat:
    """What a process does at a moment.

    activity, step, detail, position, background_save: see `ProcessStatus`. idle_seconds: time without progress.
    typical_seconds: median duration of recent iterations, None if unknown. longest_seconds: longest recent iteration.
    save_seconds: how long the background save has taken; longest_save_seconds: longest recent one.
    """

    activity: str
    step: int | None = None
    detail: str = ""
    position: tuple[int, ...] = (0, 0, 0)
    idle_seconds: float = 0.0
    typical_seconds: float | None = None
    longest_seconds: float = 0.0
    background_save: str = ""
    save_seconds: float = 0.0
    longest_save_seconds: float = 0.0

    @property
    def location(self) -> str:
        """Where the process is, in a message."""
        if self.activity == "step" and self.step is not None:
            where = f"in step {self.step}"
        else:
            where = PHRASES.get(self.activity, f"during {self.activity}")
            where += "" if self.step is None else f", step {self.step}"
        where += f", saving {self.background_save}" if self.background_save else ""
        return where + (f", {self.detail}" if self.detail else "")

    @property
    def is_first_step(self) -> bool:
        """Whether no step of this session has ended yet."""
        return self.activity == "step" and self.typical_seconds is None and not self.longest_seconds


class ProcessStatus:
    """Activity, step and progress of one process.

    activity: what the process does now, a key of `PHRASES`. detail: what it does within the activity. position: (stops,
    barriers since the last stop, activities since the last barrier). All processes of a run count it alike, because they
    execute the same program: the process with the lower position is behind. background_save: what is being saved in the
    background, "" for nothing. training_thread: identity of the thread that trains.
    Time is counted in ticks of one thread (see `tick`), so a process that was suspended and resumed has not been idle.
    """

    def __init__(self) -> None:
        self.training_thread = threading.main_thread().ident
        self.activity = OUTSIDE
        self.step: int | None = None
        self.detail = ""
        self.background_save, self.save_started = "", 0.0
        self.position = (0, 0, 0)
        self.clock = self.last_progress = 0.0
        self.iteration: tuple[str, float] | None = None  # name and start time of the current iteration
        self.durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_DURATIONS))

    def tick(self, seconds: float) -> None:
        """Advance the clock. Only one thread calls this, at regular intervals."""
        self.clock += seconds

    def record_progress(self) -> None:
        """Reset the time without progress."""
        self.last_progress = self.clock

    def set_activity(self, activity: str, step: int | None = None, detail: str = "") -> None:
        """Set what this process does now. step: its number; None keeps the previous one."""
        self.activity, self.detail = activity, detail
        self.step = self.step if step is None else step
        stops, barriers, activities = self.position
        self.position = stops, barriers, activities + 1
        if activity not in ITERATION_OF_ACTIVITY:
            self.iteration = None
        self.last_progress = self.clock

    def record_stop(self) -> None:
        """Record that all processes stop here: some wait at a barrier that the others have not reached."""
        self.position = self.position[0] + 1, 0, 0

    def leave_run(self) -> None:
        """Set the activity outside of runs."""
        self.set_activity(OUTSIDE)
        self.step = None

    def begin_iteration(self, name: str) -> None:
        """Begin a "step" or the evaluation ("evaluate") of one batch; keep the duration of a previous one of the same name."""
        now = time.monotonic()
        if self.iteration and self.iteration[0] == name:
            self.durations[name].append(now - self.iteration[1])
        self.iteration = name, now

    @contextmanager
    def performing(self, detail: str) -> Iterator[None]:
        """Report work that not every process does, such as writing the log. The position does not change."""
        before, self.detail = self.detail, detail
        self.record_progress()
        try:
            yield
        finally:
            self.detail = before
            self.record_progress()

    @contextmanager
    def at_barrier(self, name: str) -> Iterator[None]:
        """Wait for all processes at the same point of the program. Counts only in the thread that trains."""
        if threading.get_ident() != self.training_thread:  # background saves synchronize in another thread
            yield
            return
        stops, barriers, _ = self.position
        self.position = stops, barriers + 1, 0
        with self.performing(f"waiting for {name}"):
            yield

    def set_background_save(self, name: str) -> None:
        """Set what is being saved in the background; "" when the save has ended."""
        if self.background_save:
            self.durations["save"].append(self.clock - self.save_started)
        self.background_save, self.save_started = name, self.clock

    def heartbeat(self) -> Heartbeat:
        iteration, save = ITERATION_OF_ACTIVITY.get(self.activity), self.background_save
        durations = list(self.durations[iteration]) if iteration else []
        return Heartbeat(
            activity=self.activity,
            step=self.step,
            detail=self.detail,
            position=self.position,
            idle_seconds=self.clock - self.last_progress,
            typical_seconds=median(durations) if len(durations) >= MIN_DURATIONS else None,
            longest_seconds=max(durations, default=0.0),
            background_save=save,
            save_seconds=self.clock - self.save_started if save else 0.0,
            longest_save_seconds=max(list(self.durations["save"]), default=0.0),
        )


_current = ProcessStatus()


def current() -> ProcessStatus:
    """The status of this process."""
    return _current
