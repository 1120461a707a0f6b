"""The result of a finished run: its fields and result.json."""

import dataclasses
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from jaxdp import __version__
from jaxdp.checkpoint.progress import Progress

if TYPE_CHECKING:  # it imports JAX, which takes seconds; reports read results without it
    from jaxdp.training.run import Run


@dataclass(frozen=True, repr=False)
class TrainResult:
    """Result of a finished run. Seconds are wall-clock time, summed over all sessions of the run.

    With early stopping (`stop.patience`), accuracy, top5 and loss describe the best checkpoint, after best_samples samples, at
    best_epoch (None without early stopping); steps, samples and epochs count the whole run. stopped_early: whether it
    ended before its last epoch; stop_reason: why.
    accuracy, top5: shares in [0, 1]; top5 is None with fewer than six classes. loss: mean held-out cross entropy.
    images_per_second: of training alone, without compilation, evaluation, audits and saving. seconds_to_first_step: from the
    start of the command, of the last session that took a step. compilation_seconds: time that the run waited for a program;
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

    def __repr__(self) -> str:
        return (
            f"TrainResult(accuracy={self.accuracy:.4f}, loss={self.loss:.4f}, epochs={self.epochs:.2f}, steps={self.steps}, "
            f"wall_seconds={self.wall_seconds:.1f}, workdir={self.workdir!r}, ...)"
        )

    @classmethod
    def collect(cls, run: "Run", evaluation: dict[str, Any]) -> "TrainResult":
        """The result of a run that has ended. All processes call this. evaluation: of the checkpoint that is the result."""
        group, plan, progress = run.processes, run.plan, progress_now(run)
        by_process = group.all_gather_object("bad images", progress.bad_images, while_waiting=lambda: None)
        bad_images = {name: reason for images in by_process for name, reason in images.items()}
        stop_reason = run.stop_reason if progress.samples < plan.total_samples else None
        progress = dataclasses.replace(progress, bad_images=bad_images, stop_reason=stop_reason)
        assert progress.first_step_seconds is not None
        report, phase = group.straggler_report(whole_run=True), plan.phase_before(progress.samples)
        has_best = run.config.stop.patience is not None
        shared = {field.name for field in dataclasses.fields(cls)} & {field.name for field in dataclasses.fields(progress)}
        strategies = [run.compiler.shown_strategy(each) for each in plan.phases[: phase.index + 1]]
        return cls(
            accuracy=evaluation["eval_accuracy"],
            top5=evaluation.get("eval_top5"),
            loss=evaluation["eval_loss"],
            eval_examples=evaluation["eval_examples"],
            epochs=run.epoch,
            seconds_to_first_step=progress.first_step_seconds,
            images_per_second=progress.samples / progress.training_seconds,
            devices=phase.devices,
            device_kind=run.devices[0].device_kind,
            mesh=phase.shape,
            versions=versions(),
            workdir=run.location,
            strategy=", ".join(dict.fromkeys(strategies)),
            processes=group.num_processes,
            hosts=len(set(group.host_numbers)),
            waiting_share=report.get("waiting_share", 0.0),
            slowest=report.get("slowest", []),
            save_error=run.checkpoints.last_error,
            best_samples=evaluation["samples"] if has_best else None,
            best_epoch=evaluation["epoch"] if has_best else None,
            stopped_early=stop_reason is not None,
            **{name: getattr(progress, name) for name in shared},
        )


def progress_now(run: "Run") -> Progress:
    """The progress of a run with its times and bad images up to now."""
    return dataclasses.replace(run.progress, wall_seconds=run.clock.wall_seconds, bad_images=run.datasets.bad_images)


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's numbers depend on."""
    own = {"jaxdp": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")}
