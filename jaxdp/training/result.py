"""What a run knows of itself while it goes on, and what it gave in the end."""

import dataclasses
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from jaxdp import __version__
from jaxdp.config import ConfigError
from jaxdp.parallel.stragglers import in_words
from jaxdp.training.console import clock


@dataclass
class Progress:
    """Where a run stands beside its state, saved with every checkpoint. Seconds add up over all sessions of the run.

    evaluated: the last evaluation's record. evaluation_due: one fell due at these samples and is not done. pinned: samples of
    checkpoints that are kept for good. told_exploded: it was said that the loss has exploded. sessions: how often the run was
    started.
    """

    samples: int = 0
    steps: int = 0
    wall_seconds: float = 0.0
    training_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    input_seconds: float = 0.0
    saving_seconds: float = 0.0
    compilation_seconds: float = 0.0
    first_step_seconds: float | None = None
    evaluated: dict | None = None
    evaluation_due: bool = False
    skipped_steps: int = 0
    bad_images: dict = dataclasses.field(default_factory=dict)
    pinned: list = dataclasses.field(default_factory=list)
    told_exploded: bool = False
    sessions: int = 1


@dataclass(frozen=True)
class TrainResult:
    """What a finished run gave. accuracy and top5 are shares in [0, 1]; seconds are wall-clock, over all sessions of the run.

    images_per_second leaves out compilation, evaluation and saving; seconds_to_first_step counts from the start of the command;
    compilation_seconds are those in which the run waited for a program, most being compiled while it trains.
    Work that was lost when a session was cut off and done again is counted once. Of the last session's steps: waiting_share of
    their time the devices waited for a process that was not ready, and slowest are those that they waited for most.
    """

    accuracy: float
    top5: float
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
    versions: dict
    workdir: str
    skipped_steps: int = 0
    strategy: str = ""
    input_seconds: float = 0.0
    saving_seconds: float = 0.0
    compilation_seconds: float = 0.0
    sessions: int = 1
    bad_images: dict = dataclasses.field(default_factory=dict)
    processes: int = 1
    hosts: int = 1
    waiting_share: float = 0.0
    slowest: list = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, progress: Progress, plan, **more) -> "TrainResult":
        """Of a run that has come to the end of its plan; more: the fields that neither of them tells."""
        phase, last = plan.phases[-1], progress.evaluated
        both = {field.name for field in dataclasses.fields(cls)} & {field.name for field in dataclasses.fields(progress)}
        return cls(
            accuracy=last["eval_accuracy"],
            top5=last["eval_top5"],
            loss=last["eval_loss"],
            eval_examples=last["eval_examples"],
            epochs=progress.samples / plan.examples,
            seconds_to_first_step=progress.first_step_seconds,
            images_per_second=progress.samples / progress.training_seconds,
            devices=phase.devices,
            mesh=(phase.vertical, phase.horizontal),
            versions=versions(),
            **{name: getattr(progress, name) for name in both},
            **more,
        )


def versions() -> dict[str, str]:
    """Of everything that a run's numbers depend on."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    own = {"jaxdp": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in packages}


def read_result(path: Path, text: str) -> TrainResult:
    """The result that a finished run left in `path`. Raises ConfigError where it is damaged."""
    try:
        return dataclasses.replace(TypeAdapter(TrainResult).validate_json(text), workdir=str(path))
    except ValidationError:
        raise ConfigError(
            f"--workdir: {str(path)!r} is not allowed; its result.json is damaged; "
            "delete that file to go on from the last checkpoint, or give another directory"
        ) from None


def show_result(screen, result: TrainResult) -> None:
    skipped = f", {result.skipped_steps} of them skipped for a gradient that was not finite" if result.skipped_steps else ""
    screen.say(
        f"accuracy {100 * result.accuracy:.2f} %  (top-5 {100 * result.top5:.2f} %, {result.eval_examples} held-out "
        f"images)  after {result.epochs:.1f} epochs, {result.steps} steps{skipped}"
    )
    sessions = f" in {result.sessions} sessions" if result.sessions > 1 else ""
    screen.say(
        f"time {clock(result.wall_seconds)}{sessions}, first step after {result.seconds_to_first_step:.0f} s, "
        f"{result.images_per_second:.0f} images/s without compilation and evaluation"
    )
    if result.slowest:
        screen.say(in_words({"waiting_share": result.waiting_share, "slowest": result.slowest}))
    if result.bad_images:
        first = ", ".join(f"{name} ({reason})" for name, reason in list(result.bad_images.items())[:5])
        screen.say(f"{len(result.bad_images)} images could not be used and were skipped, all listed in result.json: {first}")
    files = [
        name
        for name in ("result.json", "metrics.jsonl", "training.png", "tensorboard", "profile", "checkpoints")
        if (Path(result.workdir) / name).exists()
    ]
    screen.say(f"results in {result.workdir}: {', '.join(files)}")
    if "training.png" in files:
        screen.picture(Path(result.workdir) / "training.png")
