"""Callbacks that warn while a run trains: slow input, unusable images, stragglers."""

import math
import time
from collections.abc import Mapping
from typing import Any

from jaxdp.distributed import stragglers
from jaxdp.training.callback import Callback
from jaxdp.training.run import Run, add_to_record

SETTLING_STEPS = 10  # first steps, whose input time is not representative
MIN_INPUT_SHARE = 0.1
MAX_STORAGE_SHARE = 0.5  # above which the threads that decode need faster storage, not more cores
MIN_WAITING_SHARE, WAITING_INTERVAL_SECONDS = 0.1, 60.0


class InputAdvice(Callback):
    """Reports once that the devices wait for images, and what would help; names the first unusable image."""

    def __init__(self) -> None:
        self.input_shown = self.bad_images_shown = False

    def after_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if not run.is_logged:
            return
        progress, bad_images = run.progress, run.datasets.bad_images
        if not self.input_shown and metrics["step"] > SETTLING_STEPS:
            warning = input_warning(
                progress.samples, progress.training_seconds, input_seconds=progress.input_seconds, source=run.datasets.train
            )
            if warning:
                self.input_shown = True
                run.info(warning)
        if bad_images and not self.bad_images_shown:
            self.bad_images_shown = True
            name, reason = next(iter(bad_images.items()))
            run.info(f"skipped {name}: {reason}; all skipped images are listed at the end of the run")


class StragglerWarnings(Callback):
    """Logs which process the rest wait for, and shows it at most once a minute; attached with several processes."""

    def __init__(self) -> None:
        self.shown = -math.inf

    def after_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        run.processes.record_step(metrics["step"], *run.step_times)
        if not run.is_logged or not (report := run.processes.straggler_report()):
            return
        add_to_record(run, {"waiting_share": report["waiting_share"], "slowest_rank": report["slowest"][0]["rank"]})
        now = time.monotonic()
        if report["waiting_share"] > MIN_WAITING_SHARE and now - self.shown > WAITING_INTERVAL_SECONDS:
            self.shown = now
            run.info(stragglers.describe(report))


def input_warning(images: int, seconds: float, *, input_seconds: float, source: Any) -> str | None:
    """A warning with the current and the required input throughput; None if waiting took less than a tenth of the time.

    images: number trained on in `seconds`. input_seconds: how long the devices waited for images during this time. source: may
    have `threads`, the number of decoding threads, and `storage_share`, the share of their time that they wait for a network.
    """
    if input_seconds < MIN_INPUT_SHARE * seconds:
        return None
    actual, required = images / seconds, images / max(seconds - input_seconds, 1e-9)
    warning = (
        f"input-bound: {100 * input_seconds / seconds:.0f} % of the time was spent waiting for images; "
        f"{actual:.0f} images/s are loaded, {required:.0f} are needed"
    )
    threads = getattr(source, "threads", None)
    if threads is None:
        return warning
    waiting = getattr(source, "storage_share", 0.0)
    if waiting > MAX_STORAGE_SHARE:
        return (
            f"{warning}: the {threads} threads wait {100 * waiting:.0f} % of their time for storage, so more cores do not help"
        )
    missing = max(1, math.ceil(threads * (required / actual - 1)))
    cores = f"{missing} more core{'s' * (missing > 1)}"
    return f"{warning}: {cores} in addition to the {threads} that decode (--data.threads)"
