"""The state of training: a pytree of arrays, how it begins, and where it is on the devices between two steps.

Every device holds the whole state (`StateLayout`), except with `reduce.update sharded` (`modes/sharded_update.py`).
Evaluations and checkpoints use the whole state, so files do not depend on the layout.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxdp.choices import OPTIMIZERS, TASKS
from jaxdp.config import Config
from jaxdp.network import FrozenStages, InitialValues, Network
from jaxdp.optim import build_optimizer, loss_scale
from jaxdp.optim.groups import check_groups, factors_of
from jaxdp.optim.optimizer import StateInParts
from jaxdp.optim.squares import SquaredNorms, SumOfSquares, local_sums_of_squares


class TrainState(NamedTuple):
    """Everything that a step changes.

    params, batch_stats (running statistics of batch normalization), opt_state: float32 trees; opt_state covers the trainable
    parameters. average: an `Average`, or () without averaging. loss_scale: a `jaxdp.optim.loss_scale.LossScale`.
    """

    params: Any
    batch_stats: Any
    opt_state: Any
    average: Any
    loss_scale: Any

    @property
    def eval_variables(self) -> tuple[dict, dict]:
        """(params, batch_stats) for evaluation: averaged if averaging is on and a step was taken."""
        if self.average == ():
            return self.params, self.batch_stats
        current, average = (self.params, self.batch_stats), (self.average.params, self.average.batch_stats)
        trained = tuple({name: now[name] for name in names} for now, names in zip(current, average, strict=True))
        chosen = _average_or(trained, average, self.average.steps)
        return tuple(now | new for now, new in zip(current, chosen, strict=True))


@jax.jit
def _average_or(current: tuple, average: tuple, steps: jax.Array) -> tuple:
    """The average; `current` before the first step."""
    return jax.tree.map(lambda now, mean: jnp.where(steps > 0, mean, now), current, average)


class Average(NamedTuple):
    """An exponential moving average of trained parameters and statistics over `steps` steps; zeros before the first."""

    params: Any
    batch_stats: Any
    steps: jax.Array


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def from_host(value: Any, mesh: Mesh) -> jax.Array:
    """An array that every process has, replicated on a mesh, without a check that the processes agree."""
    return jax.make_array_from_process_local_data(replicated(mesh), np.asarray(value))


def constants_of(config: Config, mesh: Mesh) -> Any:
    """The constants of a registered task, a tree of arrays replicated on a mesh; None if it has none."""
    return jax.tree.map(lambda value: from_host(np.asarray(value, _dtype_on_device(value)), mesh), _constants(config))


def abstract_constants(config: Config, mesh: Mesh | AbstractMesh) -> Any:
    """Shapes, dtypes and shardings of `constants_of`, which are not copied for them."""
    one = partial(jax.ShapeDtypeStruct, sharding=replicated(mesh))
    return jax.tree.map(lambda value: one(np.shape(value), _dtype_on_device(value)), _constants(config))


def _constants(config: Config) -> Any:
    own = TASKS[config.task].own
    return own and own.constants


def _dtype_on_device(value: Any) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(jnp.result_type(value))


def make_optimizer(
    config: Config, model: Network, *, learning_rate: float | jax.Array, momentum: float | jax.Array
) -> optax.GradientTransformation:
    """The optimizer of the trainable parameters, with the factors of their groups; unfrozen ones have a separate state."""
    finetune = config.finetune
    later = model.split_frozen(finetune.frozen_stages)[0] if finetune.frozen != finetune.frozen_stages else ()
    has_groups = config.optimizer.groups or finetune.layer_decay != 1
    factors = partial(factors_of, config, model) if has_groups else None
    return build_optimizer(config.optimizer, learning_rate, momentum, factors_of=factors, later=sum(later, ()))


def _initial_state(config: Config, model: Network, seed: jax.typing.ArrayLike) -> TrainState:
    shape = (config.data.image_size, config.data.image_size, 3)
    params, batch_stats = model.init(jax.random.key(seed), shape)
    check_groups(config, model, params)
    trainable, average = partial(model.trainable, frozen_stages=config.finetune.frozen), ()
    if config.optimizer.average_decay is not None:
        average = jax.tree.map(jnp.zeros_like, Average(trainable(params), trainable(batch_stats), jnp.zeros((), jnp.float32)))
    opt_state = make_optimizer(config, model, learning_rate=0.0, momentum=0.0).init(trainable(params))
    return TrainState(params, batch_stats, opt_state, average, loss_scale.create(config.optimizer.loss_scale))


def abstract_state(config: Config, model: Network, mesh: Mesh | AbstractMesh) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is computed."""
    shapes = jax.eval_shape(lambda: _initial_state(config, model, config.seed))
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated(mesh)), shapes)


def create_state(config: Config, model: Network, mesh: Mesh) -> TrainState:
    """The state before the first step, drawn from `config.seed`, whole on every device. All seeds share one compiled program.

    `jaxdp.create_state` places it for the step.
    """
    seed = jax.device_put(np.uint32(config.seed), mesh.local_devices[0])  # virtual devices share the cores: one draws for all
    return replicate(jax.jit(partial(_initial_state, config, model))(seed), mesh)


def with_values(state: TrainState, values: InitialValues, mesh: Mesh) -> TrainState:
    """A state with given values in place of its own of the same names."""

    def value(path: tuple, leaf: jax.Array) -> jax.Array:
        given = values.tensors.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        return leaf if given is None else from_host(given, mesh)

    return state._replace(
        **jax.tree.map_with_path(value, {"params": state.params, "batch_stats": state.batch_stats}),
    )


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree, replicated on a mesh; unchanged if it already is. Every process has at least one of the devices."""
    if all(leaf.sharding == replicated(mesh) for leaf in jax.tree.leaves(tree)):
        return tree
    if not mesh.is_multi_process:
        return jax.device_put(tree, replicated(mesh))

    def move(leaf: jax.Array) -> jax.Array:
        copies = [jax.device_put(leaf.addressable_data(0), device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(leaf.shape, replicated(mesh), copies)

    return jax.tree.map(move, tree)


class StateLayout:
    """Where a state is between two steps: here whole on every device."""

    sharded = False
    sums_of_squares: SumOfSquares = staticmethod(local_sums_of_squares)

    def __init__(self, config: Config, model: Network, mesh: Mesh | AbstractMesh) -> None:
        self.config, self.model, self.mesh = config, model, mesh

    @cached_property
    def whole(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, whole on every device."""
        return abstract_state(self.config, self.model, self.mesh)

    @property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state between two steps."""
        return self.whole

    @property
    def specs(self) -> Any:
        """The state's `PartitionSpec`s for `shard_map`."""
        return PartitionSpec()

    @property
    def network(self) -> Network | FrozenStages:
        """The network in training: with `finetune.frozen_stages` its first stages only compute features."""
        stages = self.config.finetune.frozen
        return FrozenStages(self.model, stages) if stages else self.model

    def trained(self, tree: dict) -> dict:
        """The entries of params or batch_stats that are trained: all but the entries of frozen stages."""
        return self.model.trainable(tree, self.config.finetune.frozen)

    def place(self, state: TrainState) -> TrainState:
        """A whole state, which may be on another mesh, or of frozen stages that are trained here, placed for the step."""
        assert isinstance(self.mesh, Mesh)
        state = replicate(state, self.mesh)
        if isinstance(self.whole.opt_state, StateInParts) and not isinstance(state.opt_state, StateInParts):
            return jax.jit(self._unfreeze, out_shardings=replicated(self.mesh))(state)
        return state

    def _unfreeze(self, state: TrainState) -> TrainState:
        """The state with what was frozen: its optimizer begins anew, and averages of what did not change are its values."""
        new = make_optimizer(self.config, self.model, learning_rate=0.0, momentum=0.0).init(state.params)
        average = state.average
        if average != ():
            average = Average(state.params | average.params, state.batch_stats | average.batch_stats, average.steps)
        return state._replace(opt_state=StateInParts(state.opt_state, new.later), average=average)

    def gather_state(self, state: TrainState) -> TrainState:
        """The whole state of a placed one, on every device."""
        return state

    def eval_variables(self, state: TrainState) -> tuple[dict, dict]:
        """`TrainState.eval_variables` of a placed state."""
        return state.eval_variables

    def squares(self, gradient: dict, params: dict) -> SquaredNorms:
        """The sums of squares of a gradient and of the trained parameters of a placed state, for its update.

        Called inside `shard_map`."""
        uses_weight_norms = OPTIMIZERS[self.config.optimizer.name].uses_weight_norms
        return SquaredNorms.compute(gradient, params if uses_weight_norms else (), self.sums_of_squares)

    def params_gatherer(self) -> Callable[[dict], dict]:
        """A function of the parameters of a placed state, to be called inside `shard_map`: the parameters of the network."""
        return lambda params: params
