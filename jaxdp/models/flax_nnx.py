"""A `flax.nnx` module as a network: `Param` variables are trained, the statistics of `BatchNorm` averaged over workers."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.models.batch_norm import count_values, is_counting
from jaxdp.models.stages import (
    Path,
    UnusableModule,
    check_stages,
    declares_stages,
    foreign_statistics,
    join_stages,
    mode_arguments,
    moments_of,
    nest,
    segments_of,
    split_by_stage,
    without_empty,
)
from jaxdp.parallel.mesh import AXES

KINDS = (nnx.Param, nnx.BatchStat, nnx.RngState, ...)  # ...: constants
CONSTANT_KEY = 0


class NnxNet:
    """An nnx module as a network. See `jaxdp.models.registered.Net`.

    build(key) constructs the module; it is called in traces only. norm: "per_worker" or "synchronized". Constants, arrays that
    are neither `Param` nor `BatchStat`, do not depend on the run's seed.
    """

    def __init__(self, build: Callable[[jax.Array], nnx.Module], norm: str) -> None:
        self.build, self.synchronized = build, norm == "synchronized"
        self.paths: tuple[Path, ...] = ((),)
        jax.eval_shape(lambda: self._inspect(build(jax.random.key(CONSTANT_KEY))))
        self.segments = segments_of(self.paths)

    def _inspect(self, module: nnx.Module) -> None:
        """Store the structure of the module, which does not depend on the values of its arrays."""
        if not isinstance(module, nnx.Module):
            reason = f"the function with a parameter rngs returns {type(module).__name__}, not an nnx module"
            raise UnusableModule(reason, "return an nnx.Module, or take the model config alone")
        self.graph, (*states, constants) = _split(module)
        # Variables with shapes in place of values, by their path in the module
        self.params, self.batch_stats, self.random = (
            {path: jax.tree.map(_shape, variable) for path, variable in nnx.to_flat_state(state)} for state in states
        )
        modules = list(nnx.iter_modules(module))
        self.has_constants = bool(jax.tree.leaves(constants)) or any(_holds_array(one) for _, one in modules)
        norms = {path for path, one in modules if isinstance(one, nnx.BatchNorm)}
        for path in self.batch_stats:
            if path[:-1] not in norms:
                raise foreign_statistics("/".join(_names(path)))
        if declares_stages(module):
            names = {id(one): _names(path) for path, one in modules}
            self.paths = check_stages(names.get(id(stage)) for stage in module.stages())  # type: ignore[attr-defined]

    def init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[dict, dict]:
        """(params, batch_stats), trees by segment."""
        _, (params, batch_stats, *_) = _split(self.build(key))
        params, batch_stats = (split_by_stage(nest(_values(state)), self.paths) for state in (params, batch_stats))
        return params, without_empty(batch_stats)

    def apply_segment(
        self, params: dict, batch_stats: dict, x: Any, *, index: int, train: bool, key: jax.Array | None
    ) -> tuple[Any, dict]:
        """(output of a segment, moments)."""
        (path,) = paths = self.paths[index : index + 1]
        key = jax.random.key(0) if key is None else key
        module = self._merge(join_stages(params, paths), join_stages(batch_stats, paths), key)
        module.train() if train else module.eval()
        inputs: dict[Path, tuple[nnx.BatchNorm, tuple[int, ...]]] = {}
        for name, layer in nnx.iter_modules(module):
            if train and isinstance(layer, nnx.BatchNorm):
                layer.momentum = 0.0  # the statistics become those of this batch
                if self.synchronized:
                    layer.axis_name = AXES  # type: ignore[assignment]
                if is_counting():
                    _record_input(layer, _names(name), inputs)
        called: Any = module.stages()[index] if path else module  # type: ignore[attr-defined]
        arguments: dict[str, Any] = mode_arguments(called.__call__, train)
        if "rngs" in inspect.signature(called.__call__).parameters:
            arguments["rngs"] = nnx.Rngs(jax.random.fold_in(key, len(self.random) + index))  # unlike those of `_merge`
        before, given = _constants(module), _values(nnx.state(module, nnx.BatchStat))
        y = called(x, **arguments)
        if not train:
            return y, {}
        for name, value in _constants(module).items():
            if before.get(name, value) is not value:
                raise UnusableModule(f"the call changes {'/'.join(name)}, which a run cannot keep", "change no variables")
        changed = {
            name: value for name, value in _values(nnx.state(module, nnx.BatchStat)).items() if name[: len(path)] == path
        }
        for name, (layer, shape) in inputs.items():
            if changed.get((*name, "mean")) is not given[*name, "mean"]:  # it does not use its running averages
                count_values("/".join(name), shape, channels=layer.axis, axes=layer.axis_name)
        return y, moments_of(without_empty(split_by_stage(nest(changed), paths)))

    def _merge(self, params: dict, batch_stats: dict, key: jax.Array) -> nnx.Module:
        """The module with these values. Variables of other segments hold shapes; the keys of dropout follow from `key`."""
        states = [
            {path: _with_value(variable, _find(tree, _names(path))) for path, variable in variables.items()}
            for tree, variables in ((params, self.params), (batch_stats, self.batch_stats))
        ]
        random = {}
        for number, (path, variable) in enumerate(self.random.items()):
            (like,) = jax.tree.leaves(variable)
            if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
                random[path] = _with_value(variable, jax.random.split(jax.random.fold_in(key, number), like.shape))
            else:
                random[path] = _with_value(variable, jnp.zeros(like.shape, like.dtype))
        parts = [nnx.from_flat_state(flat) for flat in (*states, random)]
        if not self.has_constants:
            return nnx.merge(self.graph, *parts, nnx.State({}))
        module = self.build(jax.random.key(CONSTANT_KEY))  # for its constants; XLA drops its other arrays
        nnx.update(module, *parts)
        return module


def _record_input(layer: nnx.BatchNorm, name: Path, inputs: dict[Path, tuple[nnx.BatchNorm, tuple[int, ...]]]) -> None:
    """Store the shape of the layer's input when it is called, from its `promote_dtype`, which receives it."""
    promote = layer.promote_dtype

    def record(arrays: tuple, **options: Any) -> tuple:
        inputs[name] = (layer, arrays[0].shape)
        return promote(arrays, **options)

    layer.promote_dtype = record  # type: ignore[assignment]


def _holds_array(module: nnx.Module) -> bool:
    """Whether an attribute is an array and no `Variable`. In a trace, nnx makes it a part of the graph definition."""
    leaves = jax.tree.leaves(list(vars(module).values()), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable | nnx.Module))
    return any(isinstance(leaf, jax.Array) for leaf in leaves)


def _split(module: nnx.Module) -> tuple[Any, list[Any]]:
    """(graph definition, states of the KINDS)."""
    split: Any = nnx.split(module, *KINDS)
    return split[0], list(split[1:])


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _names(path: tuple) -> Path:
    """A path in a module, whose lists have integer indices, as names."""
    return tuple(map(str, path))


def _values(state: Any) -> dict[Path, Any]:
    """Arrays of a state by path."""
    return {_names(path): jax.tree.leaves(variable)[0] for path, variable in nnx.to_flat_state(state)}


def _constants(module: nnx.Module) -> dict[Path, Any]:
    return _values(_split(module)[1][-1])


def _find(tree: Any, path: Path) -> Any:
    """The leaf at a path, or None."""
    for name in path:
        tree = tree.get(name, {})
    return None if isinstance(tree, dict) else tree


def _with_value(variable: Any, value: Any) -> Any:
    """A copy of a variable with another value; the same for None."""
    return variable if value is None else jax.tree.map(lambda _: value, variable)
