"""Warnings shown while a run trains: slow input, unusable images, stragglers."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxdp.distributed import stragglers

SETTLING_STEPS = 10  # first steps, whose input time is not representative
MIN_INPUT_SHARE = 0.1
MAX_STORAGE_SHARE = 0.5  # above which the threads that decode need faster storage, not more cores
MIN_WAITING_SHARE, WAITING_INTERVAL_SECONDS = 0.1, 60.0


class RunWarnings:
    """Shows each warning once, that about stragglers at most once per minute.

    info: called with each warning. training: the source of the training images.
    """

    def __init__(self, info: Callable[[str], Any], training: Any) -> None:
        self.info, self.training = info, training
        self._input_shown = self._bad_images_shown = False
        self._stragglers_shown = -math.inf

    def check_input(self, step: int, *, images: int, seconds: float, input_seconds: float) -> None:
        """Warn if the devices wait for images, see `input_warning`. step: number of steps taken."""
        if self._input_shown or step <= SETTLING_STEPS:
            return
        warning = input_warning(images, seconds, input_seconds=input_seconds, source=self.training)
        if warning:
            self._input_shown = True
            self.info(warning)

    def check_bad_images(self, bad_images: Mapping[str, str]) -> None:
        """Warn about the first unusable image; all of them are listed at the end of the run."""
        if bad_images and not self._bad_images_shown:
            self._bad_images_shown = True
            name, reason = next(iter(bad_images.items()))
            self.info(f"skipped {name}: {reason}; all skipped images are listed at the end of the run")

    def check_stragglers(self, report: Mapping[str, Any]) -> None:
        """Warn if processes wait for others. report: see `ProcessGroup.straggler_report`."""
        now = time.monotonic()
        if report["waiting_share"] > MIN_WAITING_SHARE and now - self._stragglers_shown > WAITING_INTERVAL_SECONDS:
            self._stragglers_shown = now
            self.info(stragglers.describe(dict(report)))


def input_warning(images: int, seconds: float, *, input_seconds: float, source: Any) -> str | None:
    """A warning with the current and the required input throughput; None if waiting took less than a tenth of the time.

    images: number trained on in `seconds`, of which the devices waited `input_seconds` for images. source: may have `threads`,
    the number of decoding threads, and `storage_share`, the share of their time in which they wait for a network.
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
