"""jaxdp: synchronous data-parallel training of image classifiers on a two-dimensional device mesh, in JAX.

Public names are imported on first use: `import jaxdp` imports neither JAX nor any other package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers see; the names of the table below and `plan`
    from jaxdp import data as data
    from jaxdp import losses as losses
    from jaxdp import models as models
    from jaxdp import optim as optim
    from jaxdp import report as report
    from jaxdp import schedules as schedules
    from jaxdp.analysis.first_gradient import first_gradient as first_gradient
    from jaxdp.config import Config as Config
    from jaxdp.distributed.signal_handler import Stopped as Stopped
    from jaxdp.errors import ConfigError as ConfigError
    from jaxdp.errors import TrainingError as TrainingError
    from jaxdp.inference.evaluate import evaluate as evaluate
    from jaxdp.inference.load_run import load_params as load_params
    from jaxdp.inference.predict import Predictions as Predictions
    from jaxdp.inference.predict import predict as predict
    from jaxdp.parallel.allreduce import all_reduce_mean as all_reduce_mean
    from jaxdp.parallel.allreduce import all_reduce_sum as all_reduce_sum
    from jaxdp.parallel.mesh import make_mesh as make_mesh
    from jaxdp.planning import Plan
    from jaxdp.recipes import load_config as load_config
    from jaxdp.registration import register_augmentation as register_augmentation
    from jaxdp.registration import register_dataset as register_dataset
    from jaxdp.registration import register_loss as register_loss
    from jaxdp.registration import register_metric as register_metric
    from jaxdp.registration import register_model as register_model
    from jaxdp.registration import register_optimizer as register_optimizer
    from jaxdp.registration import register_schedule as register_schedule
    from jaxdp.registration import register_strategy as register_strategy
    from jaxdp.registration import register_task as register_task
    from jaxdp.session.train import train as train
    from jaxdp.task import Metric as Metric
    from jaxdp.task import Task as Task
    from jaxdp.training.callback import Callback as Callback
    from jaxdp.training.own_loop import create_state as create_state
    from jaxdp.training.result import TrainResult as TrainResult
    from jaxdp.training.step import make_train_step as make_train_step

__version__ = "0.1.0"

_MODULE_OF = {
    "all_reduce_mean": "jaxdp.parallel.allreduce",
    "all_reduce_sum": "jaxdp.parallel.allreduce",
    "Callback": "jaxdp.training.callback",
    "Config": "jaxdp.config",
    "ConfigError": "jaxdp.errors",
    "create_state": "jaxdp.training.own_loop",
    "evaluate": "jaxdp.inference.evaluate",
    "first_gradient": "jaxdp.analysis.first_gradient",
    "load_config": "jaxdp.recipes",
    "load_params": "jaxdp.inference.load_run",
    "make_mesh": "jaxdp.parallel.mesh",
    "make_train_step": "jaxdp.training.step",
    "Metric": "jaxdp.task",
    "predict": "jaxdp.inference.predict",
    "Predictions": "jaxdp.inference.predict",
    "register_augmentation": "jaxdp.registration",
    "register_dataset": "jaxdp.registration",
    "register_loss": "jaxdp.registration",
    "register_metric": "jaxdp.registration",
    "register_model": "jaxdp.registration",
    "register_optimizer": "jaxdp.registration",
    "register_schedule": "jaxdp.registration",
    "register_strategy": "jaxdp.registration",
    "register_task": "jaxdp.registration",
    "Stopped": "jaxdp.distributed.signal_handler",
    "Task": "jaxdp.task",
    "train": "jaxdp.session.train",
    "TrainingError": "jaxdp.errors",
    "TrainResult": "jaxdp.training.result",
}
_MODULES = (
    "data",
    "losses",
    "models",
    "optim",
    "report",
    "schedules",
)
__all__ = [*_MODULE_OF, *_MODULES, "plan"]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"jaxdp.{name}")
    raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def plan(config: "Config", devices: int | None = None, hosts: int = 1, *, rows: int | None = None) -> "Plan":
    """The `jaxdp.planning.Plan` of a config on `devices` devices of `hosts` hosts (default: the devices of this machine).

    hosts: with a process each. rows: of the mesh; default one for each host. Raises ConfigError for an invalid config, or one
    that cannot run on these devices.
    """
    from jaxdp.data.sources import inspect
    from jaxdp.distributed.runtime import start
    from jaxdp.parallel.torus import default_rows
    from jaxdp.planning import make_plan
    from jaxdp.validation import validate
    from jaxdp.xla.jax_options import jaxdp_jax_config

    config, examples = inspect(validate(config))
    with jaxdp_jax_config():
        if devices is None:
            found = start(config.mesh)
            devices, rows = len(found), rows or default_rows(found)
        return make_plan(config, examples=examples, devices=devices, processes=hosts, rows=rows)
