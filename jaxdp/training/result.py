"""The result of a finished run: its fields and result.json."""

import dataclasses
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from jaxdp import __version__
from jaxdp.metrics import PREFIX


@dataclass(frozen=True, repr=False)
class TrainResult:
    """Result of a finished run. Seconds are wall-clock time, summed over all sessions of the run.

    With early stopping (`stop.patience`), accuracy, top5 and loss describe the best checkpoint, after best_samples samples, at
    best_epoch (both None without early stopping). steps, samples and epochs count the whole run. stopped_early: whether the run
    ended before its last epoch; stop_reason: why.
    accuracy, top5: shares in [0, 1]; top5 is None with fewer than six classes. loss: mean held-out loss. metrics: registered
    metrics, by name.
    images_per_second: of training alone, without compilation, evaluation, audits and saving. seconds_to_first_step: from the
    start of the command, in the last session that took a step. compilation_seconds: time that the run waited for a program;
    most programs are compiled while it trains. Work that an interrupted session lost and a later one repeated counts once.
    waiting_share: share of the last session's step time that devices waited for a process that was not ready. slowest: the
    processes waited for most. save_error: why the last state could not be saved; None if it was. strategy: of the all-reduce,
    "none" on one device; several if the phases differ.

    `repr` shows the most important fields, `dataclasses.asdict` all.
    """

    accuracy: float
    top5: float | None
    loss: float
    eval_examples: int
    steps: int
    samples: int
    epochs: float
    wall_seconds: float
    seconds_to_first_step: float
    training_seconds: float
    evaluation_seconds: float
    images_per_second: float
    devices: int
    device_kind: str
    mesh: tuple[int, int]
    versions: dict[str, str]
    workdir: str
    metrics: dict[str, float | None] = dataclasses.field(default_factory=dict)
    skipped_steps: int = 0
    strategy: str = ""
    input_seconds: float = 0.0
    saving_seconds: float = 0.0
    compilation_seconds: float = 0.0
    audit_seconds: float = 0.0
    audits: int = 0
    sessions: int = 1
    bad_images: dict[str, str] = dataclasses.field(default_factory=dict)
    processes: int = 1
    hosts: int = 1
    waiting_share: float = 0.0
    slowest: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    save_error: str | None = None
    best_samples: int | None = None
    best_epoch: float | None = None
    stopped_early: bool = False
    stop_reason: str | None = None

    @property
    def evaluation(self) -> dict[str, Any]:
        """The metrics as an evaluation's record has them."""
        shown = {"accuracy": self.accuracy, "top5": self.top5, "loss": self.loss} | self.metrics
        return {f"{PREFIX}{name}": value for name, value in shown.items()}

    def __repr__(self) -> str:
        return (
            f"TrainResult(accuracy={self.accuracy:.4f}, loss={self.loss:.4f}, epochs={self.epochs:.2f}, steps={self.steps}, "
            f"wall_seconds={self.wall_seconds:.1f}, workdir={self.workdir!r}, ...)"
        )


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's numbers depend on."""
    own = {"jaxdp": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")}
