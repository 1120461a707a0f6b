"""The result of a finished run: its fields and result.json."""

import dataclasses
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from jaxdp import __version__


@dataclass(frozen=True, repr=False)
class TrainResult:
    """Result of a finished run. Seconds are wall-clock time, summed over all sessions of the run.

    With early stopping (`stop.patience`), metrics and loss describe the best checkpoint, after best_samples samples, at
    best_epoch (both None without early stopping). steps, samples and epochs count the whole run. stopped_early: whether the run
    ended before its last epoch; stop_reason: why.
    metrics: of the held-out images, by name; each is also an attribute, such as accuracy and top5, shares in [0, 1]; None if an
    evaluation lacks it, such as top5 with fewer than six classes. loss: mean held-out loss.
    images_per_second: of training alone, without compilation, evaluation, audits and saving. seconds_to_first_step: from the
    start of the command, in the last session that took a step. compilation_seconds: time that the run waited for a program;
    most programs are compiled while it trains. Work that an interrupted session lost and a later one repeated counts once.
    waiting_share: share of the last session's step time that devices waited for a process that was not ready. slowest: the
    processes waited for most. save_error: why the last state could not be saved; None if it was. strategy: of the all-reduce,
    "none" on one device; several if the phases differ.

    `repr` shows the most important fields, `dataclasses.asdict` all.
    """

    metrics: dict[str, float | None]
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

    def __getattr__(self, name: str) -> Any:
        """A metric."""
        if name in vars(self).get("metrics", {}):
            return self.metrics[name]
        raise AttributeError(name)

    def to_dict(self) -> dict[str, Any]:
        """The content of result.json: metrics and fields by name."""
        fields = dataclasses.asdict(self)
        return fields.pop("metrics") | fields

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "TrainResult":
        """The result with the content of `to_dict`. Raises pydantic's ValidationError for a damaged one."""
        names = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in content.items() if name not in names}
        known = {name: value for name, value in content.items() if name in names}
        return TypeAdapter(cls).validate_python(known | {"metrics": values})

    def __repr__(self) -> str:
        shown = "".join(f"{name}={value:.4f}, " for name, value in [*self.metrics.items()][:1] if value is not None)
        return (
            f"TrainResult({shown}loss={self.loss:.4f}, epochs={self.epochs:.2f}, steps={self.steps}, "
            f"wall_seconds={self.wall_seconds:.1f}, workdir={self.workdir!r}, ...)"
        )


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's numbers depend on."""
    own = {"jaxdp": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")}
