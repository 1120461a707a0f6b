"""The public parts of a training run, for `train.py`.

They are imported on first use, so that a command handles signals before it imports JAX.
"""

from typing import TYPE_CHECKING, Any

from jaxdp.lazy import import_name, public_imports

if TYPE_CHECKING:  # what type checkers and editors see, and what is imported on first use
    from jaxdp.planning import PlannedPhase as PlannedPhase
    from jaxdp.session.assembly import open_directory as open_directory
    from jaxdp.session.assembly import open_run as open_run
    from jaxdp.session.job import Job as Job
    from jaxdp.session.job import join_processes as join_processes
    from jaxdp.session.origin import open_origin as open_origin
    from jaxdp.session.preparation import prepare as prepare
    from jaxdp.training.loop import begin as begin
    from jaxdp.training.loop import begin_step as begin_step
    from jaxdp.training.loop import complete_steps as complete_steps
    from jaxdp.training.loop import evaluate_now as evaluate_now
    from jaxdp.training.loop import finish as finish
    from jaxdp.training.loop import next_batch as next_batch
    from jaxdp.training.loop import open_phase as open_phase
    from jaxdp.training.loop import start_step as start_step
    from jaxdp.training.restore import restore_or_initialize as restore_or_initialize
    from jaxdp.training.result import TrainResult as TrainResult
    from jaxdp.training.run import Run as Run

_IMPORTS = public_imports(__name__)
__all__ = [*_IMPORTS]


def __getattr__(name: str) -> Any:
    return import_name(__name__, name, _IMPORTS)


def __dir__() -> list[str]:
    return sorted(__all__)
