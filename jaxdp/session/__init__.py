"""The public parts of a training run, in the order of the calls in `train.py`.

They are imported on first use, so that a command handles signals before it imports JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; the same names as in the table below
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

_MODULE_OF = {
    "Job": "jaxdp.session.job",
    "join_processes": "jaxdp.session.job",
    "open_origin": "jaxdp.session.origin",
    "prepare": "jaxdp.session.preparation",
    "open_directory": "jaxdp.session.assembly",
    "open_run": "jaxdp.session.assembly",
    "restore_or_initialize": "jaxdp.training.restore",
    "begin": "jaxdp.training.loop",
    "open_phase": "jaxdp.training.loop",
    "next_batch": "jaxdp.training.loop",
    "begin_step": "jaxdp.training.loop",
    "start_step": "jaxdp.training.loop",
    "complete_steps": "jaxdp.training.loop",
    "evaluate_now": "jaxdp.training.loop",
    "finish": "jaxdp.training.loop",
    "PlannedPhase": "jaxdp.planning",
    "Run": "jaxdp.training.run",
    "TrainResult": "jaxdp.training.result",
}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
