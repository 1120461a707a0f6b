"""jaxdp: synchronous data-parallel training of image classifiers on a two-dimensional device mesh, in JAX.

The public names are imported when first used, so that `import jaxdp` starts neither JAX nor a device.
"""

import importlib

__version__ = "0.1.0"

_WHERE = {
    "Config": "jaxdp.config",
    "ConfigError": "jaxdp.errors",
    "load_config": "jaxdp.recipes",
    "TrainingError": "jaxdp.training.guard",
    "TrainResult": "jaxdp.training.result",
    "evaluate": "jaxdp.training.restored",
    "predict": "jaxdp.training.predicting",
    "Predictions": "jaxdp.training.predicting",
    "first_gradient": "jaxdp.training.first_gradient",
    "register_model": "jaxdp.registry",
    "register_strategy": "jaxdp.registry",
    "train": "jaxdp.training.session",
    "Stopped": "jaxdp.training.stop",
}
__all__ = [*_WHERE, "plan", "report"]


def __getattr__(name):
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name == "report":
        return importlib.import_module("jaxdp.report")
    raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)


def plan(config, devices=None, hosts=1):
    """The `jaxdp.planning.Plan` of a config on `devices` devices of `hosts` hosts, by default those of this machine."""
    from jaxdp.data.sources import training_examples
    from jaxdp.parallel.distributed import start
    from jaxdp.planning import make_plan
    from jaxdp.validation import validate

    config = validate(config)
    devices = len(start(config.mesh)) if devices is None else devices
    return make_plan(config, training_examples(config), devices, hosts)
