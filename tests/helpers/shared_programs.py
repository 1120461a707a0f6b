"""Compiled programs and initial states that the runs of one process share, so that a test does not trace them again."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdp.choices import AUTO_AUGMENTS, LOSSES, MODELS, OPTIMIZERS
from jaxdp.strategies import STRATEGIES
from jaxdp.training import restore
from jaxdp.training.state import replicate
from jaxdp.training.step_compiler import StepCompiler


class SharedPrograms:
    """What runs have compiled. enabled: off in tests that may replace a part of a program."""

    def __init__(self):
        self.enabled, self.made = True, {}
        StepCompiler._compile_train = self.share(StepCompiler._compile_train, self.key_of_step)
        StepCompiler._compile_evaluation = self.share(StepCompiler._compile_evaluation, self.key_of_evaluation)
        create_state = self.share(lambda *given: jax.device_get(self.create_state(*given)), self.key_of_state)
        self.create_state = restore.create_state
        restore.create_state = lambda config, model, mesh: replicate(
            jax.tree.map(jnp.array, create_state(config, model, mesh)), mesh
        )

    def share(self, make, key_of):
        """`make`, called once for each key."""

        def made(*arguments):
            key = key_of(*arguments) if self.enabled else None
            if key is None:
                return make(*arguments)
            if key not in self.made:
                self.made[key] = make(*arguments)
            return self.made[key]

        return made

    def key_of_step(self, compiler, mesh, phase):
        config = phase.config_of(compiler.plan.config)
        if compiler.images is None:
            return "step", relevant(config), compiler.pixel_stats, mesh, phase.global_batch, phase.accumulation

    def key_of_evaluation(self, compiler, mesh, rows):
        return "evaluation", relevant(compiler.plan.config), compiler.pixel_stats, mesh, rows

    def key_of_state(self, config, model, mesh):
        return "state", relevant(config), config.seed, mesh


def relevant(config):
    """All that a program may depend on: the config without what only the loop reads, and the functions that it names."""
    named = (
        (OPTIMIZERS, config.optimizer.name),
        (LOSSES, config.optimizer.loss),
        (MODELS, config.model.name),
        (STRATEGIES, config.reduce.strategy),
        (AUTO_AUGMENTS, config.data.auto_augment),
    )
    used = tuple(table.implementation(name) if name in table else None for table, name in named)
    default = type(config)()
    phases = tuple(dataclasses.replace(phase, until_epoch=None) for phase in config.batch)
    loop = ("name", "seed", "epochs", "schedule", "evaluation", "checkpoint", "logging", "stop", "storage")
    return used, dataclasses.replace(config, batch=phases, **{name: getattr(default, name) for name in loop})
