"""The callbacks of a run: which ones its configuration attaches, and in which order they are called."""

from collections.abc import Iterable

from jaxdp.config import Config
from jaxdp.loggers.callbacks import Console, MetricsFile, Plot, RecordWriter, open_tensorboard
from jaxdp.loggers.console import Quiet
from jaxdp.loggers.profile import Profile
from jaxdp.loggers.warnings import InputAdvice, Stragglers
from jaxdp.training.audit import Audit
from jaxdp.training.callback import Callback, Callbacks
from jaxdp.training.checkpoints import CheckpointInterval
from jaxdp.training.early_stopping import EarlyStopping
from jaxdp.training.health import StepChecks


def callbacks_of(
    config: Config,
    users: Iterable[Callback],
    *,
    processes: int,
    is_rank0: bool,
    screen: Quiet,
    trackers: Callback | None = None,
    uploads: Callback | None = None,
) -> Callbacks:
    """The callbacks of a run. users: those that the user has given. trackers, uploads: of a run that has them."""
    guard, logging = config.guard, config.logging
    own: list[Callback | None] = [
        StepChecks(),
        uploads,
        Stragglers() if processes > 1 else None,
        InputAdvice() if is_rank0 else None,
        Audit(guard.audit_every_steps) if guard.audit_every_steps else None,
        EarlyStopping() if config.stop.patience is not None else None,
        CheckpointInterval(),
    ]
    if (steps := logging.profiled_steps) and is_rank0:
        own.append(Profile(steps))
    loggers: list[Callback | None] = [
        Plot(),  # drawn when the log is closed: `on_end` is called in the reverse order
        MetricsFile(),
        RecordWriter("TensorBoard", open_tensorboard) if logging.tensorboard else None,
        trackers,
        Console(screen),
    ]
    present = [callback for callback in loggers if callback] if is_rank0 else []
    return Callbacks([callback for callback in own if callback], users, present)
