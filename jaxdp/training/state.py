"""The state of training: a pytree of arrays, how it begins, and where it is on the devices between two steps.

By default every device holds the whole state (a plain `StateLayout`). With a sharded update (`reduce.update sharded`; Xu et
al., arXiv 2004.13336; ZeRO stage 1, arXiv 1910.02054), it holds a shard of the trained parameters, the optimizer's state and
the averaged parameters (`Sharded`), along the rows of the mesh. A step then begins with the all-gather of the parameters, in
the dtype that the network uses. Evaluations and checkpoints use the whole state, so files do not depend on the layout.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxdp.choices import OPTIMIZERS
from jaxdp.config import Config
from jaxdp.errors import ConfigError
from jaxdp.network import FrozenStages, InitialValues, Network
from jaxdp.optim import build_optimizer, loss_scale
from jaxdp.optim.squares import SquaredNorms, SumOfSquares, local_sums_of_squares
from jaxdp.parallel import allreduce
from jaxdp.parallel.forward_dtypes import forward_dtypes
from jaxdp.parallel.mesh import HORIZONTAL
from jaxdp.parallel.shards import from_parts, own_shard, partition_spec, shard_shape, sums_of_squares_along_rows
from jaxdp.training.average import Average

VECTORS = -1  # the group of all tensors with at most one dimension: biases, parameters of normalization


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


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def from_host(value: Any, mesh: Mesh) -> jax.Array:
    """An array that every process has, replicated on a mesh, without a check that the processes agree."""
    return jax.make_array_from_process_local_data(replicated(mesh), np.asarray(value))


def make_optimizer(
    config: Config, model: Network, *, learning_rate: float | jax.Array, momentum: float | jax.Array
) -> optax.GradientTransformation:
    """The optimizer of the trainable parameters; the classifier's rate is multiplied by `finetune.head_multiplier`."""
    multiplier = config.finetune.head_multiplier
    multipliers = {} if multiplier == 1.0 else dict.fromkeys(model.segments[-1], multiplier)
    return build_optimizer(config.optimizer, learning_rate, momentum, multipliers=multipliers)


def _initial_state(config: Config, model: Network, seed: jax.typing.ArrayLike) -> TrainState:
    shape = (config.data.image_size, config.data.image_size, 3)
    params, batch_stats = model.init(jax.random.key(seed), shape)
    trainable, average = partial(model.trainable, frozen_stages=config.finetune.frozen_stages), ()
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
        stages = self.config.finetune.frozen_stages
        return FrozenStages(self.model, stages) if stages else self.model

    def trained(self, tree: dict) -> dict:
        """The entries of params or batch_stats that are trained: all but the entries of frozen stages."""
        return self.model.trainable(tree, self.config.finetune.frozen_stages)

    def place(self, state: TrainState) -> TrainState:
        """A whole state, which may be on another mesh, placed for the step."""
        assert isinstance(self.mesh, Mesh)
        return replicate(state, self.mesh)

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


class Sharded(StateLayout):
    """Each device holds its shard of what an update changes; see `jaxdp.parallel.shards`.

    What an update does not change is whole on every device: frozen parameters, running statistics, scalars.
    """

    sharded = True
    sums_of_squares: SumOfSquares = staticmethod(sums_of_squares_along_rows)

    @cached_property
    def _is_shard(self) -> TrainState:
        """True for the arrays of the state that are shards: parameters, and what the optimizer keeps for each of them."""
        params = self.trained(self.whole.params)
        optimizer = make_optimizer(self.config, self.model, learning_rate=0.0, momentum=0.0)
        # An array of the optimizer's state belongs to a parameter if its shape changes with the parameter's shape.
        other_shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((*(1,) * (leaf.ndim - 1), leaf.size + 1), leaf.dtype), params
        )
        other_state = jax.eval_shape(optimizer.init, other_shapes)
        shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
        for leaf, other in zip(jax.tree.leaves(self.whole.opt_state), jax.tree.leaves(other_state), strict=True):
            if leaf.shape != other.shape and leaf.shape not in shapes:
                name = self.config.optimizer.name
                reason = f"optimizer.name={name!r} keeps an array of shape {leaf.shape}, which no parameter has"
                raise ConfigError("reduce.update", "sharded", reason=reason, hint="omit it, or use replicated")
        nothing = jax.tree.map(lambda _: False, self.whole)
        average = nothing.average
        if average != ():
            average = average._replace(params=jax.tree.map(lambda _: True, average.params))
        return nothing._replace(
            params=nothing.params | jax.tree.map(lambda _: True, params),
            opt_state=jax.tree.map(lambda leaf, other: leaf.shape != other.shape, self.whole.opt_state, other_state),
            average=average,
        )

    @cached_property
    def abstract(self) -> TrainState:
        parts = dict(self.mesh.shape)[HORIZONTAL]

        def placed(leaf: jax.ShapeDtypeStruct, is_shard: bool) -> jax.ShapeDtypeStruct:
            if not is_shard:
                return leaf
            sharding = NamedSharding(self.mesh, partition_spec(leaf.shape))
            return jax.ShapeDtypeStruct(shard_shape(leaf.shape, parts, parts), leaf.dtype, sharding=sharding)

        return jax.tree.map(placed, self.whole, self._is_shard)

    @property
    def specs(self) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding.spec, self.abstract)

    def place(self, state: TrainState) -> TrainState:
        return self._shard(super().place(state))

    def gather_state(self, state: TrainState) -> TrainState:
        return self._gather(state)

    def eval_variables(self, state: TrainState) -> tuple[dict, dict]:
        return self._gather_eval_variables(state._replace(opt_state=())).eval_variables

    def params_gatherer(self) -> Callable[[dict], dict]:
        """It sends one message for all vectors, and one for each bucket of the other tensors of each segment. They have the
        dtype that the network uses."""
        config, whole = self.config, self.whole
        reduce, devices = config.reduce, self.mesh.size
        dtypes = forward_dtypes(config, self.model, params=whole.params, batch_stats=whole.batch_stats, devices=devices)
        trained = jax.tree.leaves_with_path(self.trained(whole.params))
        sent = [
            jax.ShapeDtypeStruct(leaf.shape, dtype)
            for (_, leaf), dtype in zip(trained, jax.tree.leaves(self.trained(dtypes)), strict=True)
        ]
        _, segments = self.model.split_frozen(config.finetune.frozen_stages)
        number = {name: index if reduce.overlap else 0 for index, segment in enumerate(segments) for name in segment}
        groups: dict[int, list[int]] = {}
        for index, (path, leaf) in enumerate(trained):
            groups.setdefault(VECTORS if leaf.ndim <= 1 else number[path[0].key], []).append(index)

        def gather_params(params: dict) -> dict:
            shards, structure = jax.tree.flatten(self.trained(params))
            gathered: dict[int, jax.Array] = {}
            for group, indices in sorted(groups.items()):
                tensors = allreduce.gather_tensors(
                    [shards[index] for index in indices],
                    [sent[index] for index in indices],
                    reduce.strategy,
                    bucket_bytes=None if group == VECTORS else reduce.bucket_bytes,
                    in_one_copy=group == VECTORS,
                )
                gathered |= dict(zip(indices, tensors, strict=True))
            # The network casts them again, which XLA drops; so its gradients have the dtype of the whole parameters.
            leaves = [gathered[index].astype(leaf.dtype) for index, (_, leaf) in enumerate(trained)]
            return params | jax.tree.unflatten(structure, leaves)

        return gather_params

    @cached_property
    def _shard(self) -> Any:
        is_shard, specs = self._is_shard, self.specs

        def shard(state: TrainState) -> TrainState:
            return jax.tree.map(lambda leaf, shards: own_shard(leaf) if shards else leaf, state, is_shard)

        return jax.jit(jax.shard_map(shard, mesh=self.mesh, in_specs=PartitionSpec(), out_specs=specs))

    def _gather_program(self, whole: TrainState, is_shard: TrainState, specs: TrainState) -> Any:
        def gather(state: TrainState) -> TrainState:
            def gather_leaf(leaf: jax.Array, shape: jax.ShapeDtypeStruct, shards: bool) -> jax.Array:
                if not shards:
                    return leaf
                if leaf.size == 0:  # which XLA cannot gather
                    return jnp.zeros(shape.shape, shape.dtype)
                flat = lax.all_gather(leaf.ravel(), HORIZONTAL, tiled=True, to="invarying")
                return from_parts(flat, shape.shape)

            return jax.tree.map(gather_leaf, state, whole, is_shard)

        mapped = jax.shard_map(gather, mesh=self.mesh, in_specs=(specs,), out_specs=PartitionSpec())
        return jax.jit(mapped, out_shardings=replicated(self.mesh))

    @cached_property
    def _gather(self) -> Any:
        return self._gather_program(self.whole, self._is_shard, self.specs)

    @cached_property
    def _gather_eval_variables(self) -> Any:
        return self._gather_program(*(tree._replace(opt_state=()) for tree in (self.whole, self._is_shard, self.specs)))


def make_layout(config: Config, model: Network, mesh: Mesh | AbstractMesh) -> StateLayout:
    """The layout of a config's state on a mesh. On one device there is nothing to shard."""
    return (Sharded if config.reduce.update == "sharded" and mesh.size > 1 else StateLayout)(config, model, mesh)
