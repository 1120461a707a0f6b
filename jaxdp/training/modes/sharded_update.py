"""The sharded update, `reduce.update sharded` (Xu et al., arXiv 2004.13336; ZeRO stage 1, arXiv 1910.02054).

Each device holds a shard of the trained parameters, the optimizer's state and the averaged parameters, along the rows of the
mesh. A step then begins with the all-gather of the parameters, in the dtype that the network uses.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.errors import ConfigError
from jaxdp.optim.squares import SumOfSquares
from jaxdp.parallel import allreduce
from jaxdp.parallel.forward_dtypes import forward_dtypes
from jaxdp.parallel.mesh import HORIZONTAL
from jaxdp.parallel.shards import from_parts, own_shard, partition_spec, shard_shape, sums_of_squares_along_rows
from jaxdp.training.state import StateLayout, TrainState, make_optimizer, replicated

VECTORS = -1  # the group of all tensors with at most one dimension: biases, parameters of normalization


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
        _, segments = self.model.split_frozen(config.finetune.frozen)
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
