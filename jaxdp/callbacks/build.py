"""The callbacks of a run: which ones its configuration attaches, and the order of their calls."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxdp.callbacks.audit import Audit
from jaxdp.callbacks.checkpoint_interval import CheckpointInterval
from jaxdp.callbacks.checks import StepChecks
from jaxdp.callbacks.early_stopping import EarlyStopping
from jaxdp.callbacks.run_files import RunFiles, Uploads
from jaxdp.config import Config
from jaxdp.loggers.console import Quiet
from jaxdp.loggers.default import Console, MetricsFile, TrainingPlot
from jaxdp.loggers.events import EventLog
from jaxdp.loggers.mlflow_logger import MlflowLogger
from jaxdp.loggers.profile import Profile
from jaxdp.loggers.tensorboard import TensorBoard
from jaxdp.loggers.wandb_logger import WandbLogger
from jaxdp.loggers.warnings import InputAdvice, StragglerWarnings
from jaxdp.training.callback import Callback, Callbacks

if TYPE_CHECKING:
    from jaxdp.cloud.mirror import Mirror, MirrorFollower


def callbacks_of(
    config: Config,
    users: Iterable[Callback],
    *,
    processes: int,
    is_rank0: bool,
    screen: Quiet,
    events: EventLog,
    mirror: "Mirror | MirrorFollower | None" = None,
) -> Callbacks:
    """The callbacks of a run. users: those that the user has given. mirror: of a run that has one."""
    guard, logging = config.guard, config.logging
    own: list[Callback | None] = [
        RunFiles() if is_rank0 else None,
        StepChecks(),
        Uploads(mirror) if mirror else None,
        StragglerWarnings() if processes > 1 else None,
        InputAdvice() if is_rank0 else None,
        Audit(guard.audit_every_steps) if guard.audit_every_steps else None,
        EarlyStopping(),
        CheckpointInterval(),
        Profile(logging.profiled_steps) if logging.profiled_steps and is_rank0 else None,
    ]
    loggers: list[Callback | None] = [
        WandbLogger(logging.wandb) if logging.wandb else None,  # they send the plot
        MlflowLogger(logging.mlflow) if logging.mlflow else None,
        TrainingPlot(),  # drawn when the log is closed: `on_end` is called in the reverse order
        MetricsFile(),
        TensorBoard() if logging.tensorboard else None,
        events,
        Console(screen),
    ]
    present = [callback for callback in loggers if callback] if is_rank0 else []
    return Callbacks([callback for callback in own if callback], users, present)
