"""jaxdp: synchronous data-parallel training of image classifiers on a two-dimensional device mesh, in JAX.

Public names are imported on first use: `import jaxdp` imports neither JAX nor any other package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp import report
    from jaxdp.config import Config
    from jaxdp.planning import Plan

__version__ = "0.1.0"

_MODULE_OF = {
    "Callback": "jaxdp.training.callback",
    "Config": "jaxdp.config",
    "ConfigError": "jaxdp.errors",
    "load_config": "jaxdp.recipes",
    "TrainingError": "jaxdp.errors",
    "TrainResult": "jaxdp.training.result",
    "evaluate": "jaxdp.inference.evaluate",
    "predict": "jaxdp.inference.predict",
    "Predictions": "jaxdp.inference.predict",
    "first_gradient": "jaxdp.analysis.first_gradient",
    "register_dataset": "jaxdp.registration",
    "register_model": "jaxdp.registration",
    "register_optimizer": "jaxdp.registration",
    "register_strategy": "jaxdp.registration",
    "train": "jaxdp.session",
    "Stopped": "jaxdp.distributed.preemption",
}
__all__ = [*_MODULE_OF, "plan", "report"]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name == "report":
        return importlib.import_module("jaxdp.report")
    raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def plan(config: "Config", devices: int | None = None, hosts: int = 1) -> "Plan":
    """The `jaxdp.planning.Plan` of a config on `devices` devices of `hosts` hosts (default: the devices of this machine).

    Raises ConfigError for an invalid config, or one that cannot run on these devices.
    """
    from jaxdp.data.sources import inspect
    from jaxdp.distributed.runtime import start
    from jaxdp.planning import make_plan
    from jaxdp.validation import validate
    from jaxdp.xla.jax_options import own_options

    config, examples = inspect(validate(config))
    with own_options():
        devices = len(start(config.mesh)) if devices is None else devices
        return make_plan(config, examples=examples, devices=devices, hosts=hosts)
