"""The callback of a run at a URL."""

import jax

from jaxdp.cloud.mirror import Mirror, MirrorFollower
from jaxdp.training.callback import Callback
from jaxdp.training.run import Run


class Uploads(Callback):
    """Starts the uploads of a run at a URL, and ends the run if another process has taken it over."""

    def __init__(self, mirror: Mirror | MirrorFollower) -> None:
        self.mirror = mirror

    def on_start(self, run: Run) -> None:
        self.mirror.begin(run.checkpoints.retention, run.info)

    def before_step(self, run: Run, batch: dict[str, jax.Array]) -> None:
        self.mirror.check()
