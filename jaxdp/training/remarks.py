"""What people are told of a run while it goes on, beside its numbers: once each, or now and then."""

import math
import time

from jaxdp.parallel import stragglers
from jaxdp.training import guard

SETTLED_STEPS = 10  # after which it can be told whether input keeps up
WAITING_TOLD, WAITING_SECONDS = 0.1, 60.0  # from which share on, and how often, people are told that processes wait


class Remarks:
    """say: where they are said. training: the training images."""

    def __init__(self, say, training):
        self.say, self.training = say, training
        self.of_input = self.of_bad_images = False
        self.of_waiting = -math.inf

    def input(self, progress) -> None:
        """That images come too slowly, once steps have settled."""
        if self.of_input or progress.steps <= SETTLED_STEPS:
            return
        remark = guard.input_remark(progress.samples, progress.training_seconds, progress.input_seconds, self.training)
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
