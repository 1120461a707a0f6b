"""The program of `Run.gradient`: the mean gradient of a step, without the step."""

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES
from jaxdp.planning import PlannedPhase
from jaxdp.training.state import TrainState, make_placement
from jaxdp.training.step import Batch, step_gradients
from jaxdp.training.step_compiler import StepCompiler, abstract_arguments
from jaxdp.xla import options


def compile_gradient(compiler: StepCompiler, phase: PlannedPhase) -> Callable:
    """A compiled function of the arguments of the phase's step that returns its gradient, whole on every device."""
    config, mesh, model = compiler.config_of(phase), compiler.mesh(phase), compiler.model
    placement = make_placement(config, model, mesh)
    whole = dataclasses.replace(config, reduce=dataclasses.replace(config.reduce, update="replicated"))
    gradients = step_gradients(whole, placement, pixel_stats=compiler.pixel_stats, accumulation=phase.accumulation)

    def gradient(  # noqa: PLR0917 - shard_map passes arguments by position
        state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array], images: jax.Array | None = None
    ) -> dict:
        return gradients(state, batch, hyperparameters["seed"], images=images)[0]

    everywhere, resident = PartitionSpec(), compiler.images is not None
    in_specs = (placement.specs, PartitionSpec(AXES), everywhere) + (everywhere,) * resident
    check_vma = allreduce.check_vma(config.reduce.strategy)
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=in_specs, out_specs=everywhere, check_vma=check_vma)
    lowered = jax.jit(mapped).lower(*abstract_arguments(config, model, phase, mesh=mesh, images=compiler.images))
    compiled = lowered.compile(options.compiler_options(config.compile, mesh.devices.flat[0].platform))
    return compiler.with_images(compiled, mesh)
