"""What people are told of a run while it goes on, beside its numbers: once each, or now and then."""

import math
import time

from jaxdp.parallel import stragglers

SETTLED_STEPS = 10  # after which it can be told whether input keeps up
WAITING_TOLD, WAITING_SECONDS = 0.1, 60.0  # from which share on, and how often, people are told that processes wait


class Remarks:
    """say: where they are said. training: the training images."""

    def __init__(self, say, training):
        self.say, self.training = say, training
        self.of_input = self.of_bad_images = False
        self.of_waiting = -math.inf

    def input(self, step: int, progress) -> None:
        """That images come too slowly, once steps have settled."""
        if self.of_input or step <= SETTLED_STEPS:
            return
        remark = input_remark(progress.samples, progress.training_seconds, progress.input_seconds, self.training)
        if remark:
            self.of_input = True
            self.say(remark)

    def bad_images(self, bad: dict[str, str]) -> None:
        """The first image that cannot be used is told at once, the others at the end."""
        if bad and not self.of_bad_images:
            self.of_bad_images = True
            name, reason = next(iter(bad.items()))
            self.say(f"{name} cannot be used ({reason}) and is skipped; all such images are counted and listed at the end")

    def waiting(self, waiting: dict) -> None:
        """That processes wait for others. waiting: see `Team.waiting`."""
        if waiting["waiting_share"] > WAITING_TOLD and time.monotonic() - self.of_waiting > WAITING_SECONDS:
            self.of_waiting = time.monotonic()
            self.say(stragglers.in_words(waiting))


def input_remark(images: int, seconds: float, waited: float, source) -> str | None:
    """What to say of a run that waited for its images for a tenth of its time or more: what comes, is needed, and is missing.

    images: trained on in `seconds`, for `waited` of which the devices had none.
    """
    if waited < 0.1 * seconds:
        return None
    had, needed = images / seconds, images / max(seconds - waited, 1e-9)
    start = f"input-bound: {100 * waited / seconds:.0f} % of the time was spent waiting for images; {had:.0f} images/s come, "
    threads = getattr(source, "threads", None)
    if threads is None:
        return f"{start}{needed:.0f} are needed"
    missing = max(1, math.ceil(threads * (needed / had - 1)))
    cores = f"{missing} more core{'s' * (missing > 1)}"
    return f"{start}{needed:.0f} are needed: {cores} beside the {threads} that decode (--data.threads)"
