"""The compiled programs of a run, built in background threads before they are needed."""

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from threading import Lock
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import models
from jaxdp.config import Config
from jaxdp.data.feed import batch_sharding
from jaxdp.data.groups import AHEAD
from jaxdp.parallel import compilation, wire
from jaxdp.parallel.mesh import abstract_mesh, make_mesh, of_every_process
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.training.evaluation import make_evaluation_step
from jaxdp.training.state import abstract_state, from_host, replicated
from jaxdp.training.step import HYPERPARAMETERS, make_train_step

EVALUATED = {"labels": jnp.int32, "positions": jnp.uint32, "seen": jnp.int32, "weights": jnp.int32}


def _abstract_batch(config: Config, mesh, rows: int, names: dict) -> dict:
    size, sharding = config.data.stored_size or config.data.image_size, batch_sharding(mesh)
    images = {"images": jax.ShapeDtypeStruct((rows, size, size, 3), jnp.uint8, sharding=sharding)}
    return images | {name: jax.ShapeDtypeStruct((rows,), dtype, sharding=sharding) for name, dtype in names.items()}


def trace_train_step(config: Config, model, pixels, phase: PlannedPhase, mesh, images=None):
    """The training step of a phase, traced for `mesh`, which may be an AbstractMesh: to be looked at, lowered, compiled.

    images: all training images (or their shape), where they are kept on the devices.
    """
    step = make_train_step(config, model, pixels, mesh, phase.accumulation, images is not None)
    state = abstract_state(config, model, mesh)
    batch = _abstract_batch(config, mesh, phase.global_batch, {"labels": jnp.int32, "positions": jnp.uint32})
    scalar = partial(jax.ShapeDtypeStruct, (), sharding=replicated(mesh))
    hyperparameters = dict.fromkeys(HYPERPARAMETERS, scalar(dtype=jnp.float32)) | {"seed": scalar(dtype=jnp.uint32)}
    kept = ()
    if images is not None:
        del batch["images"]
        batch["numbers"] = batch["labels"]
        kept = (jax.ShapeDtypeStruct(images.shape, images.dtype, sharding=replicated(mesh)),)
    return step.trace(state, batch, hyperparameters, *kept)


def wire_accounts(plan: Plan) -> list[wire.Account]:
    """What the steps of a plan send; phases that send the same share an account."""
    accounts = {}
    for phase in plan.phases:
        one = wire_account(plan.config, phase)
        same = accounts.setdefault(dataclasses.replace(one, phases=()), one)
        if same is not one:
            accounts[dataclasses.replace(one, phases=())] = dataclasses.replace(same, phases=(*same.phases, phase.index))
    return list(accounts.values())


def wire_account(config: Config, phase: PlannedPhase) -> wire.Account:
    """What a step of a phase sends, from the step traced for a mesh of that shape; no device is needed."""
    mesh = abstract_mesh(phase.vertical, phase.horizontal)
    traced = trace_train_step(config, models.create(config.model, platform="any"), (0.0, 1.0), phase, mesh)
    found = wire.collectives(traced.jaxpr, dict(mesh.shape))
    return wire.Account(phase.vertical, phase.horizontal, config.reduce.strategy, (phase.index,), tuple(found))


def mesh_of(phase: PlannedPhase, devices=None):
    """The mesh of a phase, over equally many devices of each process. devices: process by process; None: JAX's own."""
    if devices is not None:
        devices = of_every_process(devices, phase.devices, phase.devices // phase.local_devices)
    return make_mesh(phase.vertical, phase.horizontal, devices)


class _OnDevice(NamedTuple):
    """A compiled step, and all training images, which lie on the devices."""

    compiled: object
    images: jax.Array

    def __call__(self, state, batch, hyperparameters):
        return self.compiled(state, batch, hyperparameters, self.images)

    def as_text(self) -> str:
        return self.compiled.as_text()


class Programs:
    """Ahead-of-time compilation of every training and evaluation step of a plan, each distinct one once.

    `prepare_*` starts a compilation and returns at once; `train_step` and `evaluation_step` wait for it if they must.
    """

    def __init__(
        self, plan: Plan, model, pixels, evaluation_examples: int, strategies: dict | None = None, images=None, devices=None
    ):
        """strategies: all-reduce strategy by mesh shape, where the config leaves it to be chosen. images: all training images,
        uint8 [N, H, W, 3], where they are to be kept on the devices. devices: all that may be used, process by process."""
        self.images, self.devices = images, devices
        self.plan, self.model, self.pixels, self.strategies = plan, model, pixels, strategies or {}
        self.evaluation_examples = evaluation_examples
        self.meshes = {}
        self.seed = cache(partial(from_host, np.uint32(plan.config.seed)))  # on a mesh, put there once
        self.futures: dict[tuple, Future] = {}
        self.kept, self.lock = {}, Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="compile")  # one at a time: tracing is Python

    def mesh(self, phase: PlannedPhase):
        shape = (phase.vertical, phase.horizontal)
        if shape not in self.meshes:
            self.meshes[shape] = mesh_of(phase, self.devices)
        return self.meshes[shape]

    def strategy(self, phase: PlannedPhase) -> str:
        return self.strategies.get((phase.vertical, phase.horizontal), self.plan.config.reduce.strategy)

    def evaluation_rows(self, phase: PlannedPhase) -> tuple[int, int]:
        """(images an evaluation step counts, rows of its batch: the same rounded up to a multiple of the devices)."""
        examples, images = self.evaluation_examples, self.plan.config.evaluation.batch
        if images is None:  # as much as training holds at a time, evened out over the batches
            data = self.plan.config.data
            fitting = data.ahead_bytes // (AHEAD + 1) // data.image_bytes // phase.local_devices * phase.devices
            batches = -(-examples // max(1, min(phase.per_worker_batch * phase.devices, fitting)))
            images = -(-examples // batches)
        images = min(images, examples)
        return images, -(-images // phase.devices) * phase.devices

    def prepare_train(self, phase: PlannedPhase) -> Future:
        mesh = self.mesh(phase)
        key = ("train", mesh, phase.global_batch, phase.accumulation)
        if key not in self.futures:
            self.futures[key] = self.thread.submit(self._compile_train, mesh, phase)
        return self.futures[key]

    def prepare_evaluation(self, phase: PlannedPhase) -> Future:
        mesh = self.mesh(phase)
        key = ("evaluation", mesh, self.evaluation_rows(phase)[1])
        if key not in self.futures:
            self.futures[key] = self.thread.submit(self._compile_evaluation, mesh, key[2])
        return self.futures[key]

    def _compile_train(self, mesh, phase: PlannedPhase):
        config = self.plan.config
        config = dataclasses.replace(config, reduce=dataclasses.replace(config.reduce, strategy=self.strategy(phase)))
        traced = trace_train_step(config, self.model, self.pixels, phase, mesh, self.images)
        compiled = traced.lower().compile(compilation.options(config.compile, mesh.devices.flat[0].platform))
        if self.images is None:
            return compiled
        return _OnDevice(compiled, self._kept(mesh))

    def _kept(self, mesh):
        """All training images on the devices of a mesh, put there once."""
        with self.lock:
            if mesh not in self.kept:
                self.kept[mesh] = from_host(self.images, mesh)
            return self.kept[mesh]

    def _compile_evaluation(self, mesh, rows: int):
        config = self.plan.config
        step = make_evaluation_step(config, self.model, self.pixels, mesh)
        state = abstract_state(config, self.model, mesh)
        batch = _abstract_batch(config, mesh, rows, EVALUATED)
        options = compilation.options(config.compile, mesh.devices.flat[0].platform)
        return step.lower(state.params, state.batch_stats, batch).compile(options)

    def hyperparameters(self, phase: PlannedPhase, samples: int):
        """The device scalars of the step at `samples` samples seen."""
        values = {"learning_rate": np.float32(self.plan.learning_rate(samples)), "momentum": np.float32(phase.momentum)}
        mesh = self.mesh(phase)
        return {name: from_host(value, mesh) for name, value in values.items()} | {"seed": self.seed(mesh)}

    def close(self):
        self.thread.shutdown(wait=False, cancel_futures=True)
