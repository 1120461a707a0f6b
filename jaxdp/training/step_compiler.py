"""Compilation of the programs of a run, in a background thread before they are needed."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxdp.config import Config
from jaxdp.data.host_crops import evaluation_transform
from jaxdp.data.prefetch import AHEAD_BYTES, PREFETCH_DEPTH, batch_sharding
from jaxdp.distributed import status
from jaxdp.errors import ConfigError
from jaxdp.network import Network
from jaxdp.parallel import allreduce, traffic
from jaxdp.parallel.mesh import AXES, devices_of_every_process, make_mesh
from jaxdp.parallel.reduce_scatter import inexact_collective_reason
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.targets import as_tree, target_of
from jaxdp.training import request_flags
from jaxdp.training.evaluation import make_evaluation_step
from jaxdp.training.objective import Batch, PixelStats
from jaxdp.training.state import (
    StateLayout,
    TrainState,
    abstract_constants,
    abstract_state,
    constants_of,
    from_host,
    replicated,
)
from jaxdp.training.step import HYPERPARAMETERS, make_layout, make_train_step, step_gradient
from jaxdp.xla import options
from jaxdp.xla.jax_options import jaxdp_jax_config

EVALUATION_COLUMNS = {"positions": jnp.uint32, "seen": jnp.int32, "weights": jnp.int32}


def _abstract_batch(
    config: Config, mesh: Mesh | AbstractMesh, rows: int, *, size: int, columns: dict[str, Any]
) -> dict[str, Any]:
    array = partial(jax.ShapeDtypeStruct, sharding=batch_sharding(mesh))
    labels = jax.tree.map(lambda one: array((rows, *one.shape[1:]), one.dtype), as_tree(target_of(config).empty(1)))
    images = {"images": array((rows, size, size, 3), jnp.uint8), "labels": labels}
    return images | {name: array((rows,), dtype) for name, dtype in columns.items()}


def trace_train_step(
    config: Config,
    model: Network,
    phase: PlannedPhase,
    *,
    mesh: Mesh | AbstractMesh,
    pixel_stats: PixelStats = (0.0, 1.0),
    images: Any = None,
) -> jax.stages.Traced:
    """The training step of a phase, traced for `mesh`, to be inspected, lowered or compiled.

    images: all training images (or their shape and dtype) if they are resident on the devices.
    """
    resident, config = images is not None, phase.config_of(config)
    step = make_train_step(config, model, mesh, pixel_stats=pixel_stats, accumulation=phase.accumulation, resident=resident)
    state, batch, *more = abstract_arguments(config, model, phase, mesh=mesh, images=images)
    return step.trace(state, batch | {request_flags.BATCH_KEY: request_flags.abstract(mesh)}, *more)


def trace_evaluation_step(
    config: Config, model: Network, rows: int, *, mesh: Mesh, pixel_stats: PixelStats = (0.0, 1.0)
) -> jax.stages.Traced:
    """The evaluation step of batches of `rows` (see `make_evaluation_step`), traced for `mesh`."""
    step = make_evaluation_step(config, model, mesh, pixel_stats=pixel_stats)
    state = abstract_state(config, model, mesh)
    batch = _abstract_batch(config, mesh, rows, size=evaluation_transform(config)[1], columns=EVALUATION_COLUMNS)
    batch[request_flags.BATCH_KEY] = request_flags.abstract(mesh)
    return step.trace(state.params, state.batch_stats, batch, abstract_constants(config, mesh))


def abstract_arguments(
    config: Config, model: Network, phase: PlannedPhase, *, mesh: Mesh | AbstractMesh, images: Any = None
) -> tuple:
    """Shapes, dtypes and shardings of the arguments of a training step. config: with the image size of the phase."""
    state = make_layout(config, model, mesh).abstract
    size = config.data.stored_size or config.data.image_size
    batch = _abstract_batch(config, mesh, phase.global_batch, size=size, columns={"positions": jnp.uint32})
    scalar = partial(jax.ShapeDtypeStruct, (), sharding=replicated(mesh))
    hyperparameters = dict.fromkeys(HYPERPARAMETERS, scalar(dtype=jnp.float32)) | {"seed": scalar(dtype=jnp.uint32)}
    if (constants := abstract_constants(config, mesh)) is not None:
        hyperparameters["constants"] = constants
    resident: tuple[jax.ShapeDtypeStruct, ...] = ()
    if images is not None:
        del batch["images"]
        batch["indices"] = jax.ShapeDtypeStruct((phase.global_batch,), jnp.int32, sharding=batch_sharding(mesh))
        resident = (jax.ShapeDtypeStruct(images.shape, images.dtype, sharding=replicated(mesh)),)
    return state, batch, hyperparameters, *resident


def mesh_of(phase: PlannedPhase, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of a phase, over equally many devices of each process. devices: ordered by process; None: JAX's."""
    if devices is not None:
        devices = devices_of_every_process(devices, phase.devices, phase.devices // phase.local_devices)
    return make_mesh(phase.vertical, phase.horizontal, devices)


@dataclasses.dataclass(frozen=True)
class _Program:
    """A compiled program, whose call may wait for other processes. resident: its last arguments, such as training images."""

    compiled: jax.stages.Compiled
    resident: tuple[Any, ...]

    @status.current().waiting(status.DEVICES)
    def __call__(self, *arguments: Any) -> Any:
        return self.compiled(*arguments, *self.resident)

    def as_text(self) -> str | None:
        return self.compiled.as_text()


class StepCompiler:
    """Compiles every distinct program of a plan once, ahead of time: training and evaluation steps, and programs of callbacks.

    The `prepare_*` methods start a compilation and return its future at once.
    """

    def __init__(
        self,
        plan: Plan,
        model: Network,
        *,
        pixel_stats: PixelStats,
        evaluation_examples: int,
        images: np.ndarray | None = None,
        devices: list[jax.Device] | None = None,
    ) -> None:
        """images: all training images, uint8 [N, H, W, 3], if they are resident on the devices. devices: all usable ones,
        ordered by process."""
        self.plan, self.model, self.pixel_stats = plan, model, pixel_stats
        self.images, self.devices = images, devices
        self.evaluation_examples = evaluation_examples
        self.meshes: dict[tuple[int, int], Mesh] = {}
        self.layouts: dict[tuple, StateLayout] = {}
        self.constants = cache(self._transfer_constants)
        self.task_constants = cache(partial(constants_of, plan.config))  # on a mesh
        self.futures: dict[tuple, Future] = {}
        self.resident_images = cache(partial(from_host, images))  # on a mesh; the compiling thread alone calls it
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="compile")  # one thread: tracing holds the interpreter anyway

    def mesh(self, phase: PlannedPhase) -> Mesh:
        """The mesh of a phase; phases of the same shape share one."""
        if phase.shape not in self.meshes:
            self.meshes[phase.shape] = mesh_of(phase, self.devices)
        return self.meshes[phase.shape]

    def layout(self, phase: PlannedPhase) -> StateLayout:
        """Where the state is on the devices during a phase; phases of the same shape share it, before and after unfreezing."""
        key = phase.shape, phase.unfrozen
        if key not in self.layouts:
            self.layouts[key] = make_layout(phase.config_of(self.plan.config), self.model, self.mesh(phase))
        return self.layouts[key]

    def shown_strategy(self, phase: PlannedPhase) -> str:
        """The all-reduce strategy of a phase and whether the update is sharded; "none" on one device, without all-reduce."""
        reduce = self.plan.config.reduce
        return reduce.strategy + ", sharded update" * (reduce.update == "sharded") if phase.devices > 1 else "none"

    def evaluation_rows(self, phase: PlannedPhase) -> tuple[int, int]:
        """(images that an evaluation step counts, rows of its batch: the images rounded up to a multiple of the devices).

        As many images as the largest training batch on this mesh or the host's memory allows, in batches of equal size. So
        phases of one mesh share the program.
        """
        largest = max(each.per_worker_batch for each in self.plan.phases if each.shape == phase.shape)
        image_bytes = 3 * evaluation_transform(self.plan.config)[1] ** 2
        fitting = AHEAD_BYTES // (PREFETCH_DEPTH + 1) // image_bytes // phase.local_devices * phase.devices
        batches = -(-self.evaluation_examples // max(1, min(largest * phase.devices, fitting)))
        images = -(-self.evaluation_examples // batches)
        return images, -(-images // phase.devices) * phase.devices

    def prepare_train(self, phase: PlannedPhase) -> Future[Callable]:
        """Future of the training step of a phase: (state, batch, hyperparameters) -> (state, metrics)."""
        return self.once(("train", *self.key(phase)), self._compile_train, self.mesh(phase), phase)

    def prepare_gradient(self, phase: PlannedPhase) -> Future[Callable]:
        """Future of a function of the step's arguments that returns its mean gradient alone, whole on every device."""
        return self.once(("gradient", *self.key(phase)), self._compile_gradient, phase)

    def key(self, phase: PlannedPhase) -> tuple:
        """What the programs of a phase depend on."""
        return self.mesh(phase), phase.global_batch, phase.accumulation, phase.image_size, phase.unfrozen

    def prepare_evaluation(self, phase: PlannedPhase) -> Future[Callable]:
        """Future of the evaluation step of a phase (see `make_evaluation_step`)."""
        mesh, rows = self.mesh(phase), self.evaluation_rows(phase)[1]
        return self.once(("evaluation", mesh, rows), self._compile_evaluation, mesh, rows)

    def once(self, key: tuple, compile: Callable, *arguments: Any) -> Future:
        """The future of compile(*arguments), which starts when its key is requested first."""
        if key not in self.futures:
            self.futures[key] = self.thread.submit(jaxdp_jax_config()(compile), *arguments)
        return self.futures[key]

    def _compile_train(self, mesh: Mesh, phase: PlannedPhase) -> Callable:
        config = phase.config_of(self.plan.config)
        traced = trace_train_step(config, self.model, phase, mesh=mesh, pixel_stats=self.pixel_stats, images=self.images)
        if reason := inexact_collective_reason(traffic.primitives(traced.jaxpr), mesh.devices.flat[0].platform):
            raise ConfigError("reduce.strategy", config.reduce.strategy, reason=reason)
        return self._compile(traced.lower(), mesh, self._resident(mesh))

    def _compile_gradient(self, phase: PlannedPhase) -> Callable:
        config = phase.config_of(self.plan.config)
        layout = make_layout(config, self.model, self.mesh(phase))
        whole = dataclasses.replace(config, reduce=dataclasses.replace(config.reduce, update="replicated"))
        gradients = step_gradient(whole, layout, pixel_stats=self.pixel_stats, accumulation=phase.accumulation)

        def gradient(  # noqa: PLR0917 - shard_map passes arguments by position
            state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array], images: jax.Array | None = None
        ) -> dict:
            constants = hyperparameters.get("constants")
            return gradients(state, batch, hyperparameters["seed"], images=images, constants=constants)[0]

        return self.compile_mapped(gradient, layout, phase, out_specs=PartitionSpec())

    def compile_mapped(self, function: Callable, layout: StateLayout, phase: PlannedPhase, *, out_specs: Any) -> Callable:
        """Compile a function of the arguments of a step, mapped over its mesh. Resident images are added to them."""
        config, mesh, everywhere = layout.config, self.mesh(phase), PartitionSpec()
        in_specs = (layout.specs, PartitionSpec(AXES), everywhere) + (everywhere,) * (self.images is not None)
        check_vma = allreduce.check_vma(config.reduce.strategy)
        mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
        arguments = abstract_arguments(config, self.model, phase, mesh=mesh, images=self.images)
        return self._compile(jax.jit(mapped).lower(*arguments), mesh, self._resident(mesh))

    def _compile_evaluation(self, mesh: Mesh, rows: int) -> Callable:
        traced = trace_evaluation_step(self.plan.config, self.model, rows, mesh=mesh, pixel_stats=self.pixel_stats)
        return self._compile(traced.lower(), mesh, (self.task_constants(mesh),))

    def _compile(self, lowered: jax.stages.Lowered, mesh: Mesh, resident: tuple[Any, ...]) -> Callable:
        """A compiled program. resident: its last arguments, which are on the devices."""
        with status.current().waiting(status.COMPILER):
            compiled = lowered.compile(options.compiler_options(self.plan.config, mesh.devices.flat[0].platform))
        return _Program(compiled, resident)

    def _resident(self, mesh: Mesh) -> tuple[jax.Array, ...]:
        """The last arguments of a step: all training images, if they are on the devices."""
        return (self.resident_images(mesh),) if self.images is not None else ()

    def hyperparameters(self, phase: PlannedPhase, learning_rate: float) -> dict[str, Any]:
        """Scalars for a step of a phase with this learning rate; the call of the step transfers them."""
        return self.constants(phase.momentum, self.mesh(phase)) | {"learning_rate": np.float32(learning_rate)}

    def _transfer_constants(self, momentum: float, mesh: Mesh) -> dict[str, jax.Array]:
        scalars = {"seed": np.uint32(self.plan.config.seed), "momentum": np.float32(momentum)}
        of_task = {} if (constants := self.task_constants(mesh)) is None else {"constants": constants}
        return {name: from_host(value, mesh) for name, value in scalars.items()} | of_task

    def close(self) -> None:
        """Cancel compilations that have not started."""
        self.thread.shutdown(wait=False, cancel_futures=True)
