"""When checkpoints are saved, besides those at the end of each phase and of the run."""

import time

import jax

from jaxdp.planning import interval_elapsed
from jaxdp.training.callback import Callback
from jaxdp.training.run import Run


class CheckpointInterval(Callback):
    """Saves when an interval of `config.checkpoint` has elapsed, by epochs or time, or when the processes ask for it.

    The loop itself saves at the end of each phase and of the run.
    """

    def on_start(self, run: Run) -> None:
        self.seen = run.progress.samples
        self.asked_at: float | None = None  # `run.saved_at` when all processes were last asked to save

    def before_step(self, run: Run, batch: dict[str, jax.Array]) -> None:
        config, before, after = run.config.checkpoint, self.seen, run.progress.samples
        self.seen = after
        agreed = run.processes.take_agreed_save()  # before a new request: this save serves the previous one
        overdue = config.every_minutes is not None and time.monotonic() - run.saved_at >= 60 * config.every_minutes
        if overdue and not agreed and run.is_rank0 and self.asked_at != run.saved_at:
            self.asked_at = run.saved_at  # the answer comes two steps later
            agreed = run.processes.request_save()
        by_epochs = interval_elapsed(config.every_epochs, unit=run.plan.examples, before=before, after=after)
        if (agreed or by_epochs) and run.saved_samples != after:
            run.save()
