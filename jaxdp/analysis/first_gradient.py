"""The gradient of a run's first step, to compare strategies with one another or a mesh with a single device."""

from contextlib import closing
from typing import Any

import jax

from jaxdp.config import Config
from jaxdp.setup.prepare import make_compiler, prepare
from jaxdp.training.run import open_batches
from jaxdp.training.state import create_state
from jaxdp.validation import validate
from jaxdp.xla.jax_options import jaxdp_jax_config


@jaxdp_jax_config()
def first_gradient(config: Config) -> dict[str, Any]:
    """The mean gradient over all devices in the first step of `config`: NumPy arrays in the tree of the parameters.

    Nothing is trained or written. Raises ConfigError if the run cannot start.
    """
    plan, devices, datasets = prepare(validate(config))
    compiler, phase = make_compiler(plan, devices, datasets), plan.phases[0]
    with closing(compiler), closing(open_batches(compiler, datasets, phase)) as batches:
        state = compiler.layout(phase).place(create_state(plan.config, compiler.model, compiler.mesh(phase)))
        gradient = compiler.prepare_gradient(phase).result()
        return jax.device_get(gradient(state, batches.next(), compiler.hyperparameters(phase, 0.0)))
