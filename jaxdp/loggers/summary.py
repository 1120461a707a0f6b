"""The summary of a finished run on the screen."""

from pathlib import Path

from jaxdp import metrics
from jaxdp.distributed.stragglers import describe
from jaxdp.errors import plural
from jaxdp.files import RESULT
from jaxdp.loggers.console import Screen, format_duration
from jaxdp.training.result import TrainResult


def show_result(screen: Screen, result: TrainResult, path: Path) -> None:
    """Show the summary of a finished run. path: its directory, or its local copy."""
    skipped = f", {result.skipped_steps} of them skipped because of a non-finite gradient" if result.skipped_steps else ""
    found = {f"{metrics.PREFIX}{name}": value for name, value in result.metrics.items()} or {metrics.LOSS: result.loss}
    first, *others = metrics.words(found)
    reason = f"; stopped early: {result.stop_reason}" * result.stopped_early
    length = f"{plural(result.epochs, 'epoch', '.1f')}, {plural(result.steps, 'step')}{skipped}{reason}"
    is_best = result.best_epoch is not None
    screen.info(
        f"{first}  ({', '.join([*others, plural(result.eval_examples, 'held-out image')])})  "
        + (f"at epoch {result.best_epoch:.1f}, of the best checkpoint" if is_best else f"after {length}")
    )
    if is_best:
        screen.info(f"trained for {length}")
    sessions, of_the_last = (f" in {result.sessions} sessions", " of the last") if result.sessions > 1 else ("", "")
    first_step = f"first step{of_the_last} after {result.seconds_to_first_step:.0f} s"
    screen.info(
        f"time {format_duration(result.wall_seconds)}{sessions}, {first_step}, "
        f"{result.images_per_second:.0f} images/s without compilation and evaluation"
    )
    if result.slowest and (waiting := describe({"waiting_share": result.waiting_share, "slowest": result.slowest})):
        screen.info(waiting)
    if result.bad_images:
        examples = ", ".join(f"{name} ({reason})" for name, reason in list(result.bad_images.items())[:5])
        images = plural(len(result.bad_images), "unusable image")
        screen.info(f"skipped {images} (listed in {RESULT}): {examples}")
    names = (RESULT, "metrics.jsonl", "training.png", "tensorboard", "profile", "checkpoints")
    files = [name for name in names if (path / name).exists()]
    copy = "" if str(path) == result.workdir else f" (local copy: {path})"
    screen.info(f"results in {result.workdir}{copy}: {', '.join(files)}")
    if "training.png" in files:
        screen.image(path / "training.png")
