"""Proofs of the training step: every strategy on every mesh computes the gradient of one device, reproducibly to the bit."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
import optax

from jaxdp import models
from jaxdp.config import Compile, Config, Data, Model, Optimizer, Phase, Reduce
from jaxdp.data import prefetch
from jaxdp.data.augment import normalize
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.doctor.proof import Proof, build_on_all_ranks, largest_difference, prove
from jaxdp.errors import plural
from jaxdp.losses import cross_entropy
from jaxdp.models.resnet import TWO_BLOCKS
from jaxdp.parallel.mesh import make_mesh
from jaxdp.strategies import STRATEGIES, unsupported_reason
from jaxdp.training.state import TrainState, create_state, from_host
from jaxdp.training.step import make_layout, make_train_step
from jaxdp.xla import options

IMAGE_SIZE, CLASSES, PER_WORKER_BATCH = 12, 7, 4
PIXEL_STATS = 127.5, 64.0  # mean, standard deviation
LABEL_SMOOTHING = 0.1
TOLERANCE = 1e-5  # of a tensor's norm plus a tenth of the gradient's norm, for tensors whose gradient nearly cancels


def mesh_shapes(devices: int) -> list[tuple[int, int]]:
    """Every mesh shape (vertical, horizontal) of `devices` devices."""
    return [(vertical, devices // vertical) for vertical in range(1, devices + 1) if devices % vertical == 0]


def small_config(devices: int, reduce: Reduce, compile: Compile) -> Config:
    """A network of two blocks whose sizes no mesh axis divides, and one worker of four images per device.

    It compiles in a second. SGD without weight decay: the velocity after the first step is the gradient.
    """
    model = Model(depth=TWO_BLOCKS, width=5, stem="small", classes=CLASSES)  # type: ignore[arg-type]  # not for `validate`
    return Config(
        data=Data(source="synthetic", image_size=IMAGE_SIZE),
        model=model,
        batch=(Phase(global_batch=PER_WORKER_BATCH * devices, per_worker_batch=PER_WORKER_BATCH),),
        optimizer=Optimizer(name="sgd", weight_decay=0.0, label_smoothing=LABEL_SMOOTHING),
        reduce=reduce,
        compile=compile,
    )


def random_batch(devices: int) -> dict[str, np.ndarray]:
    """A global batch of random images whose brightness depends on the class."""
    random, count = np.random.default_rng(0), PER_WORKER_BATCH * devices
    labels = random.integers(0, CLASSES, count).astype(np.int32)
    images = random.integers(0, 120, (count, IMAGE_SIZE, IMAGE_SIZE, 3)) + 18 * labels[:, None, None, None]
    return {"images": images.astype(np.uint8), "labels": labels, "positions": np.arange(count, dtype=np.uint32)}


def named_arrays(tree: object) -> dict[str, np.ndarray]:
    """The leaves of a tree as NumPy arrays, by path."""
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def initial_state(config: Config) -> TrainState:
    """The initial state as host arrays, with 0.05 added to the parameters: zero scales would hide the gradients of blocks."""
    mesh = make_mesh(1, 1, jax.local_devices())
    state = jax.tree.map(np.asarray, create_state(config, models.create(config.model), mesh))
    return state._replace(params=jax.tree.map(lambda p: p + np.float32(0.05), state.params))


def single_device_gradient(config: Config, state: TrainState, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The gradient on one device without the training step: worker after worker, averaged in float64."""
    model = models.create(config.model)

    @jax.jit
    def gradient_of(params: dict, worker_batch: dict) -> dict:
        def loss_of(params: dict) -> jax.Array:
            images = normalize(worker_batch["images"], *PIXEL_STATS)
            logits, _ = model.apply(params, state.batch_stats, images, train=True)
            return cross_entropy(logits, worker_batch["labels"], LABEL_SMOOTHING).mean()

        return jax.grad(loss_of)(params)

    starts = range(0, len(batch["labels"]), PER_WORKER_BATCH)
    workers = [{name: rows[start : start + PER_WORKER_BATCH] for name, rows in batch.items()} for start in starts]
    gradients = [named_arrays(gradient_of(state.params, worker)) for worker in workers]
    return {name: np.mean([gradient[name].astype(np.float64) for gradient in gradients], axis=0) for name in gradients[0]}


def relative_difference(gradient: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest difference over the tensors, relative to the tensor's norm plus a tenth of the gradient's norm."""
    total_norm = np.sqrt(sum((tensor**2).sum() for tensor in expected.values()))
    return max(
        float(np.linalg.norm(gradient[name].astype(np.float64) - tensor) / (np.linalg.norm(tensor) + 0.1 * total_norm))
        for name, tensor in expected.items()
    )


class CheckedStep:
    """The compiled training step for one mesh and strategy; a call runs it from the same initial state."""

    def __init__(
        self,
        config: Config,
        mesh_shape: tuple[int, int],
        devices: Sequence[jax.Device],
        *,
        host_state: TrainState,
        batch: dict[str, np.ndarray],
    ) -> None:
        self.mesh, self.host_state, model = make_mesh(*mesh_shape, devices), host_state, models.create(config.model)
        self.layout = make_layout(config, model, self.mesh)
        step = make_train_step(config, model, self.mesh, pixel_stats=PIXEL_STATS, accumulation=1)
        local = prefetch.local_rows(self.mesh, len(batch["labels"]))
        self.batch = prefetch.to_global({name: rows[local] for name, rows in batch.items()}, self.mesh)
        self.hyperparameters = {"learning_rate": np.float32(0.1), "momentum": np.float32(0.9), "seed": np.uint32(0)}
        compiler_options = options.compiler_options(config, devices[0].platform)
        self.compiled = step.lower(self._initial_state(), self.batch, self.hyperparameters).compile(compiler_options)

    def _initial_state(self) -> TrainState:
        return self.layout.place(jax.tree.map(lambda leaf: from_host(leaf, self.mesh), self.host_state))

    def __call__(self) -> TrainState:
        """The state after one step, whole on every device."""
        state, _ = self.compiled(self._initial_state(), self.batch, self.hyperparameters)
        return jax.block_until_ready(self.layout.gather_state(state))


def replicas(state: TrainState) -> list[dict[str, np.ndarray]]:
    """The copies of the state on the devices of this process."""
    leaves = {jax.tree_util.keystr(path): leaf.addressable_shards for path, leaf in jax.tree.leaves_with_path(state)}
    count = len(next(iter(leaves.values())))
    return [{name: np.asarray(shards[i].data) for name, shards in leaves.items()} for i in range(count)]


def proofs(
    devices: Sequence[jax.Device],
    compile: Compile,
    *,
    shapes: Sequence[tuple[int, int]],
    info: Callable[[str], None],
    group: ProcessGroup,
) -> Iterator[Proof]:
    """For every strategy and mesh: compare the gradient with one device's, and two steps and all replicas with one another.

    Strategies that scatter are also verified with a sharded update. Includes registered strategies. Computes in float32 without
    TF32. devices: of all processes; all call this. shapes: of the meshes, (vertical, horizontal).
    """
    strategies = [strategy for strategy in STRATEGIES if not unsupported_reason(strategy, len(devices))]
    forms = {strategy: Reduce(strategy=strategy) for strategy in strategies}
    scattering = [name for name in strategies if STRATEGIES[name].scatters]
    forms |= {f"{name}, sharded update": Reduce(strategy=name, update="sharded") for name in scattering}
    meshes = ", ".join("x".join(map(str, shape)) for shape in shapes)
    info(f"gradients: the step with {', '.join(strategies)} on {meshes}, {plural(len(devices), 'device')} ...")
    with jax.default_matmul_precision("highest"):
        batch, config = random_batch(len(devices)), small_config(len(devices), Reduce(strategy="psum"), compile)
        state = initial_state(config)
        expected = single_device_gradient(config, state, batch)
    for form, shape in itertools.product(forms, shapes):
        config, name = small_config(len(devices), forms[form], compile), f"{form} on {'x'.join(map(str, shape))}"
        build = partial(CheckedStep, config, shape, devices, host_state=state, batch=batch)
        yield from _step_proofs(name, build, expected=expected, group=group)


def _step_proofs(
    name: str, build: Callable[[], CheckedStep], *, expected: dict[str, np.ndarray], group: ProcessGroup
) -> Iterator[Proof]:
    """The two proofs of one step. build: compiles it."""
    built: list[CheckedStep] = []

    def gradient_difference() -> float:
        with jax.default_matmul_precision("highest"):
            built.append(build_on_all_ranks(group, name, build))
        return relative_difference(named_arrays(optax.tree.get(built[0]().opt_state, "trace")), expected)

    yield prove(
        f"gradient: {name}",
        "against one device, worker after worker",
        tolerance=TOLERANCE,
        difference=gradient_difference,
        group=group,
    )
    if built:
        yield prove(
            f"same bits: {name}",
            "two steps, all devices",
            tolerance=0.0,
            difference=lambda: _replica_difference(built[0], group),
            group=group,
        )


def _replica_difference(step: CheckedStep, group: ProcessGroup) -> float:
    """Largest difference between the replicas of two steps; infinity if processes differ."""
    first, *others = [*replicas(step()), *replicas(step())]
    difference = max(largest_difference(other, first) for other in others)
    checksum = hashlib.sha256(b"".join(value.tobytes() for value in first.values())).hexdigest()
    same = len(set(group.all_gather_object("the bits of a step", checksum))) == 1
    return difference if same else max(difference, float("inf"))
