"""Proofs about the training step: every strategy on every mesh gives the gradient of one device, and the same bits twice."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
import optax

from jaxdp import models
from jaxdp.config import Compile, Config, Data, Model, Optimizer, Phase, Reduce
from jaxdp.data import feed
from jaxdp.data.augment import normalise
from jaxdp.doctor.proof import Proof, largest_difference, proven
from jaxdp.losses import cross_entropy
from jaxdp.models.resnet import TWO_BLOCKS
from jaxdp.parallel import allreduce, compilation
from jaxdp.parallel.mesh import make_mesh, unfit
from jaxdp.training.state import create_state, from_host
from jaxdp.training.step import make_train_step

SIDE, CLASSES, PER_WORKER = 12, 7, 4
PIXELS = 127.5, 64.0
SMOOTHING = 0.1
ALLOWED = 1e-5  # of a tensor's norm, and a tenth of that of the whole gradient's, where a tensor cancels to nearly nothing


def shapes(devices: int) -> list[tuple[int, int]]:
    """Every mesh (vertical, horizontal) of all devices."""
    return [(vertical, devices // vertical) for vertical in range(1, devices + 1) if devices % vertical == 0]


def small(devices: int, strategy, compile: Compile) -> Config:
    """A net of two blocks with sizes that no axis divides, a worker of four images on each device. SGD without decay, so that
    the velocity after the first step is the gradient itself."""
    return Config(
        data=Data(source="synthetic", image_size=SIDE),
        model=Model(depth=TWO_BLOCKS, width=5, stem="small", classes=CLASSES),
        batch=(Phase(global_batch=PER_WORKER * devices, per_worker_batch=PER_WORKER),),
        optimizer=Optimizer(name="sgd", weight_decay=0.0, label_smoothing=SMOOTHING),
        reduce=Reduce(strategy=strategy),
        compile=compile,
    )


def made_batch(devices: int) -> dict[str, np.ndarray]:
    """Random images with a colour by their class."""
    random, count = np.random.default_rng(0), PER_WORKER * devices
    labels = random.integers(0, CLASSES, count).astype(np.int32)
    images = random.integers(0, 120, (count, SIDE, SIDE, 3)) + 18 * labels[:, None, None, None]
    return {"images": images.astype(np.uint8), "labels": labels, "positions": np.arange(count, dtype=np.uint32)}


def flat(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def initial(config: Config) -> dict:
    """The state of a step as arrays of the host, without the zero scales that would hide the blocks."""
    state = jax.tree.map(np.asarray, create_state(config, models.create(config.model), make_mesh(1, 1)))
    return state._replace(params=jax.tree.map(lambda p: p + np.float32(0.05), state.params))


def of_one_device(config: Config, state, batch) -> dict[str, np.ndarray]:
    """The gradient on one device, without mesh or step: worker after worker, averaged in float64."""
    model = models.create(config.model)

    @jax.jit
    def gradient_of(params, part):
        def loss_of(params):
            logits, _ = model.apply(params, state.batch_stats, normalise(part["images"], *PIXELS), train=True)
            return cross_entropy(logits, part["labels"], SMOOTHING).mean()

        return jax.grad(loss_of)(params)

    count = len(batch["labels"])
    parts = [{name: rows[i : i + PER_WORKER] for name, rows in batch.items()} for i in range(0, count, PER_WORKER)]
    gradients = [flat(gradient_of(state.params, part)) for part in parts]
    return {name: np.mean([one[name].astype(np.float64) for one in gradients], axis=0) for name in gradients[0]}


def relative_difference(gradient: dict, expected: dict) -> float:
    """The largest over the tensors: norm of the difference to that of the tensor and a tenth of the whole gradient's."""
    whole = np.sqrt(sum((tensor**2).sum() for tensor in expected.values()))
    apart = (
        np.linalg.norm(gradient[name].astype(np.float64) - tensor) / (np.linalg.norm(tensor) + 0.1 * whole)
        for name, tensor in expected.items()
    )
    return max(apart)


class Step:
    """The compiled training step of a run, on one mesh with one strategy."""

    def __init__(self, config: Config, mesh_shape: tuple[int, int], devices, host_state, batch):
        self.mesh, self.host_state = make_mesh(*mesh_shape, devices), host_state
        step = make_train_step(config, models.create(config.model), PIXELS, self.mesh, 1)
        self.batch = feed.put(batch, self.mesh)
        self.hyperparameters = {"learning_rate": np.float32(0.1), "momentum": np.float32(0.9), "seed": np.uint32(0)}
        options = compilation.options(config.compile, devices[0].platform)
        self.compiled = step.lower(self._state(), self.batch, self.hyperparameters).compile(options)

    def _state(self):
        return jax.tree.map(lambda leaf: from_host(leaf, self.mesh), self.host_state)

    def __call__(self):
        """The state after one step from the first state."""
        state, _ = self.compiled(self._state(), self.batch, self.hyperparameters)
        return jax.block_until_ready(state)


def copies(state) -> list[dict[str, np.ndarray]]:
    """The state as each device has it."""
    leaves = {jax.tree_util.keystr(path): leaf.addressable_shards for path, leaf in jax.tree.leaves_with_path(state)}
    count = len(next(iter(leaves.values())))
    return [{name: np.asarray(shards[place].data) for name, shards in leaves.items()} for place in range(count)]


def proofs(devices, compile: Compile, progress) -> Iterator[Proof]:
    """For every strategy, registered ones too, and mesh: the gradient against one device's, and two steps and all devices
    against one another.

    In float32: where GPUs would round factors to TF32, they are told not to. Steps are compiled side by side, one on each core.
    """
    count = len(devices)
    batch = made_batch(count)
    with jax.default_matmul_precision("highest"):
        config = small(count, "psum", compile)
        state = initial(config)
        expected = of_one_device(config, state, batch)

    def built(strategy, shape):
        with jax.default_matmul_precision("highest"):  # of this thread
            return Step(small(count, strategy, compile), shape, devices, state, batch)

    def apart(future):
        return relative_difference(flat(optax.tree.get(future.result()().opt_state, "trace")), expected)

    strategies = [strategy for strategy in allreduce.known() if not unfit(strategy, count)]
    progress(f"the step with {', '.join(strategies)} on every mesh of {count} devices ...")
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        cases = [(strategy, shape) for strategy in strategies for shape in shapes(count)]
        for (strategy, shape), future in [(case, pool.submit(built, *case)) for case in cases]:
            name = f"{strategy} on {'x'.join(map(str, shape))}"
            yield proven(f"gradient: {name}", "with one device, worker by worker", ALLOWED, partial(apart, future))
            if future.exception() is None:
                yield proven(f"same bits: {name}", "two steps, all devices", 0.0, partial(_bits_apart, future.result()))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interruption does not wait for the compiler


def _bits_apart(step: Step) -> float:
    first, *others = [*copies(step()), *copies(step())]
    return max(largest_difference(first, other) for other in others)
