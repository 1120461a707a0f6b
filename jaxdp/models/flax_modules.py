"""Flax modules as networks: their parameters are trained; a run averages the statistics of Flax's `BatchNorm` over workers.

A network has one segment, or one for each submodule that a method `stages` of the module returns.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from jaxdp.errors import Unusable
from jaxdp.models.batch_norm import OneValue
from jaxdp.network import ROOT
from jaxdp.parallel.mesh import AXES

MODE_ARGUMENTS = {"train": True, "training": True, "deterministic": False, "use_running_average": False}
"""Parameters of a module's `__call__` -> their value in training; evaluation passes the opposite."""
COLLECTIONS = {"params", "batch_stats"}  # of a linen module
KINDS = (nnx.Param, nnx.BatchStat, nnx.RngState, ...)  # of the variables of an nnx module; ...: constants
CONSTANT_KEY = 0

Path = tuple[str, ...]


class FlaxNet(ABC):
    """A module as a network. paths: of the stages in the module; ((),) without. norm: "per_worker" or "synchronized"."""

    paths: tuple[Path, ...] = ((),)

    @property
    def segments(self) -> tuple[tuple[str, ...], ...]:
        return tuple((_name_of(path),) for path in self.paths)

    def init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[dict, dict]:
        """(params, batch_stats), trees by segment."""
        params, batch_stats = self._init(key, image_shape)
        return self._by_stage(params), _without_empty(self._by_stage(batch_stats))

    def apply_segment(
        self, params: dict, batch_stats: dict, x: Any, *, index: int, train: bool, key: jax.Array | None
    ) -> tuple[Any, dict]:
        """(output of a segment, moments)."""
        path = self.paths[index]
        own_params, own_stats = (_below(path, tree.get(_name_of(path), {})) for tree in (params, batch_stats))
        y, statistics = self._apply(own_params, own_stats, x, index=index, train=train, key=key)
        return y, _moments_of(_without_empty({_name_of(path): _subtree(statistics, path)}))

    @abstractmethod
    def _init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[Mapping, Mapping]:
        """(parameters, batch statistics) of the module."""

    @abstractmethod
    def _apply(
        self, params: dict, batch_stats: dict, x: Any, *, index: int, train: bool, key: jax.Array | None
    ) -> tuple[Any, Mapping]:
        """(output of a stage, the statistics of this batch in training, else {}).

        params, batch_stats: trees of the module with the part of this stage.
        """

    def _by_stage(self, tree: Mapping) -> dict[str, Any]:
        """A tree of the module as {name of a stage: its part}. Raises Unusable for a leaf outside all stages."""
        names = [tuple(str(key.key) for key in path) for path, _ in jax.tree.leaves_with_path(tree)]
        for name in names:
            if not any(name[: len(path)] == path for path in self.paths):
                reason = f"{'/'.join(name)} belongs to no stage"
                raise Unusable(reason, "move it into a submodule that stages() returns")
        return {_name_of(path): _subtree(tree, path) for path in self.paths}


class LinenNet(FlaxNet):
    """A linen module, whose collection `params` is trained."""

    def __init__(self, module: nn.Module, norm: str) -> None:
        self.module, self.axes = module, AXES if norm == "synchronized" else None
        if _declares_stages(module):
            found: list[Path | None] = []

            def collect(module: Any) -> None:
                found.extend(stage.path if isinstance(stage, nn.Module) else None for stage in module.stages())

            jax.eval_shape(lambda key: module.init({"params": key}, method=collect), jax.random.key(0))
            self.paths = _check_stages(found)

    def _init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[Mapping, Mapping]:
        images = jnp.zeros((1, *image_shape), jnp.float32)

        def run(module: nn.Module, x: Any) -> Any:
            for index in range(len(self.paths)):
                x = self._call(module, x, index=index, train=False)
            return x

        variables = meta.unbox(self.module.init({"params": key}, images, method=run))
        if unknown := sorted(variables.keys() - COLLECTIONS):
            raise Unusable(
                f"the module has a collection {unknown[0]!r}, which a run cannot keep", "use params and batch_stats alone"
            )
        return variables.get("params", {}), variables.get("batch_stats", {})

    def _apply(
        self, params: dict, batch_stats: dict, x: Any, *, index: int, train: bool, key: jax.Array | None
    ) -> tuple[Any, Mapping]:
        variables = {"params": params, "batch_stats": batch_stats}

        def run(module: nn.Module, x: Any) -> Any:
            return self._call(module, x, index=index, train=train)

        normalized: set[Path] = set()
        rngs = None if key is None else dict(zip(("dropout", "params"), jax.random.split(key), strict=True))
        with _statistics_of_one_batch(self.axes, train, normalized):
            if not train:
                return self.module.apply(variables, x, method=run), {}
            y, changed = self.module.apply(variables, x, method=run, rngs=rngs, mutable=["batch_stats"])
        statistics = changed.get("batch_stats", {})
        for name in flatten_dict(statistics):
            if name[:-1] not in normalized:
                raise _foreign_statistics(name)
        return y, statistics

    def _call(self, module: nn.Module, x: Any, *, index: int, train: bool) -> Any:
        """The output of a stage of the bound module, or of the module itself without stages."""
        called: Any = module.stages()[index] if self.paths != ((),) else module
        return called(x, **_mode_arguments(called.__call__, train))


class NnxNet(FlaxNet):
    """An nnx module, whose `Param` variables are trained.

    build(key) constructs the module; it is called in traces only. Constants (arrays that are neither `Param` nor `BatchStat`)
    do not depend on the run's seed.
    """

    def __init__(self, build: Callable[[jax.Array], nnx.Module], norm: str) -> None:
        self.build, self.synchronized = build, norm == "synchronized"
        jax.eval_shape(lambda: self._inspect(build(jax.random.key(CONSTANT_KEY))))

    def _inspect(self, module: nnx.Module) -> None:
        """Store the structure of the module, which does not depend on the values of its arrays."""
        if not isinstance(module, nnx.Module):
            reason = f"the function with a parameter rngs returns {type(module).__name__}, not an nnx module"
            raise Unusable(reason, "return an nnx.Module, or take the model config alone")
        split: Any = nnx.split(module, *KINDS)
        self.graph, *states, constants = split
        # Variables with shapes in place of values, by their path in the module
        self.params, self.batch_stats, self.random = (
            {path: jax.tree.map(_shape, variable) for path, variable in nnx.to_flat_state(state)} for state in states
        )
        modules = list(nnx.iter_modules(module))
        self.has_constants = bool(jax.tree.leaves(constants)) or any(_holds_array(one) for _, one in modules)
        norms = {path for path, one in modules if isinstance(one, nnx.BatchNorm)}
        for path in self.batch_stats:
            if path[:-1] not in norms:
                raise _foreign_statistics(_names(path))
        if _declares_stages(module):
            names = {id(one): _names(path) for path, one in modules}
            self.paths = _check_stages(names.get(id(stage)) for stage in module.stages())  # type: ignore[attr-defined]

    def _init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[Mapping, Mapping]:
        module = self.build(key)
        return unflatten_dict(_values(module, nnx.Param)), unflatten_dict(_values(module, nnx.BatchStat))

    def _apply(
        self, params: dict, batch_stats: dict, x: Any, *, index: int, train: bool, key: jax.Array | None
    ) -> tuple[Any, Mapping]:
        path, key = self.paths[index], jax.random.key(0) if key is None else key
        module = self._merge(params, batch_stats, key)
        module.train() if train else module.eval()
        of_one_value: set[Path] = set()
        for name, layer in nnx.iter_modules(module):
            if train and isinstance(layer, nnx.BatchNorm):
                layer.momentum = 0.0  # the statistics become the batch's own
                if self.synchronized:
                    layer.axis_name = AXES  # type: ignore[assignment]
                layer.promote_dtype = _noting_one_value(layer, _names(name), of_one_value)
        called: Any = module.stages()[index] if path else module  # type: ignore[attr-defined]
        arguments: dict[str, Any] = _mode_arguments(called.__call__, train)
        if "rngs" in inspect.signature(called.__call__).parameters:
            arguments["rngs"] = nnx.Rngs(jax.random.fold_in(key, len(self.random) + index))  # unlike the keys of `_merge`
        constants, before = _constants(module), _values(module, nnx.BatchStat)
        y = called(x, **arguments)
        if not train:
            return y, {}
        for name, value in _constants(module).items():
            if constants.get(name, value) is not value:
                raise Unusable(f"the call changes {'/'.join(name)}, which a run cannot keep", "change no variables")
        after = _values(module, nnx.BatchStat)
        for name in of_one_value:
            if after[*name, "mean"] is not before[*name, "mean"]:  # else it used running averages
                raise OneValue("/".join(name))
        return y, unflatten_dict({name: value for name, value in after.items() if name[: len(path)] == path})

    def _merge(self, params: dict, batch_stats: dict, key: jax.Array) -> nnx.Module:
        """The module with these values. Variables of other segments hold shapes; the keys of dropout follow from `key`."""
        parts = [
            {path: _with_value(variable, values.get(_names(path))) for path, variable in variables.items()}
            for values, variables in ((flatten_dict(params), self.params), (flatten_dict(batch_stats), self.batch_stats))
        ]
        random = {}
        for number, (path, variable) in enumerate(self.random.items()):
            (like,) = jax.tree.leaves(variable)
            if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
                random[path] = _with_value(variable, jax.random.split(jax.random.fold_in(key, number), like.shape))
            else:
                random[path] = _with_value(variable, jnp.zeros(like.shape, like.dtype))
        states = [nnx.from_flat_state(flat) for flat in (*parts, random)]
        if not self.has_constants:
            return nnx.merge(self.graph, *states, nnx.State({}))
        module = self.build(jax.random.key(CONSTANT_KEY))  # for its constants; XLA drops its other arrays
        nnx.update(module, *states)
        return module


def _mode_arguments(call: Callable, train: bool) -> dict[str, bool]:
    """The keyword arguments for a module's `__call__`. Raises Unusable if it requires others than images and rngs."""
    _, *others = inspect.signature(call).parameters.values()
    known = {name: value == train for name, value in MODE_ARGUMENTS.items()}
    for one in others:
        named = one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if named and one.default is one.empty and one.name not in (*known, "rngs"):
            raise Unusable(
                f"__call__ of the module requires {one.name!r}",
                f"take images alone, or with {', '.join(known)}; give other parameters a default",
            )
    return {one.name: known[one.name] for one in others if one.name in known}


def _declares_stages(module: Any) -> bool:
    """Whether the module's class has a method `stages`; an attribute of that name declares nothing."""
    return inspect.isfunction(getattr(type(module), "stages", None))


def _check_stages(paths: Iterable[Path | None]) -> tuple[Path, ...]:
    """The paths of the modules that `stages()` returned. None: not a submodule. Raises Unusable."""
    checked: list[Path] = []
    for path in paths:
        if not path:
            reason = f"item {len(checked) + 1} of stages() is not a submodule"
            raise Unusable(reason, "return submodules, in forward order")
        for other in checked:
            shorter = min(len(path), len(other))
            if path[:shorter] == other[:shorter]:
                reason = f"stages() returns {'/'.join(path)} beside {'/'.join(other)}"
                raise Unusable(reason, "return every submodule once")
        checked.append(path)
    if not checked:
        raise Unusable("stages() returns nothing", "return submodules, in forward order")
    return tuple(checked)


def _name_of(path: Path) -> str:
    """The name of a stage in the trees of the state."""
    return "/".join((ROOT, *path))


def _subtree(tree: Mapping, path: Path) -> Any:
    """The part of a tree of nested dicts at a path, {} if there is none."""
    for key in path:
        tree = tree.get(key, {})
    return tree


def _below(path: Path, part: Any) -> dict[str, Any]:
    """A tree of nested dicts with a part at a path; {} without a part."""
    for key in reversed(path if part else ()):
        part = {key: part}
    return dict(part)


def _without_empty(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that have leaves."""
    return {name: part for name, part in parts.items() if jax.tree.leaves(part)}


def _moments_of(statistics: Mapping) -> dict[str, Any]:
    """{"mean", "square"} of every BatchNorm layer, from the {"mean", "var"} of one batch."""
    if "mean" not in statistics:
        return {name: _moments_of(part) for name, part in statistics.items()}
    mean, var = statistics["mean"], statistics["var"]
    return {"mean": mean, "square": var + mean * mean}


def _foreign_statistics(name: Path) -> Unusable:
    """The error for a batch statistic that no BatchNorm layer of Flax owns."""
    return Unusable(
        f"the batch statistic {'/'.join(name)} is not of Flax's BatchNorm, the only layer whose statistics jaxdp averages over "
        "workers",
        "use BatchNorm, or register an object with init and apply that returns moments",
    )


def _statistics_of_one_batch(axes: Any, train: bool, normalized: set[Path]) -> AbstractContextManager:
    """Inside this context, `nn.BatchNorm` stores in training the mean and variance of the batch instead of moving averages.

    axes: mesh axes over which they are synchronized; None keeps each layer's own. Adds the path of every layer that is called
    to `normalized`. Calls raise OneValue, and Unusable if a layer uses running averages in training or the batch in evaluation.
    """

    def intercept(  # noqa: PLR0917 - Flax passes arguments by position
        next_fun: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext
    ) -> Any:
        layer = context.module
        if not isinstance(layer, nn.BatchNorm) or context.method_name != "__call__" or layer.scope is None or not layer.path:
            return next_fun(*args, **kwargs)
        normalized.add(layer.path)
        given = inspect.signature(layer.__call__).bind(*args, **kwargs).arguments
        if nn.merge_param("use_running_average", layer.use_running_average, given.get("use_running_average")) == train:
            raise Unusable(
                f"{'/'.join(layer.path)} has use_running_average={train} in {'training' if train else 'evaluation'}",
                "give __call__ of the module a parameter train, and the layer use_running_average=not train",
            )
        if not train:
            return next_fun(*args, **kwargs)
        copy = layer.clone(parent=None, name=None, momentum=0.0, axis_name=axes or layer.axis_name)
        if _values_of_channel(copy, given["x"].shape) == 1:
            raise OneValue("/".join(layer.path))
        y, changed = copy.apply(layer.variables, *args, **kwargs, mutable=["batch_stats"])
        for name, value in changed["batch_stats"].items():
            layer.put_variable("batch_stats", name, value)
        return y

    return nn.intercept_methods(intercept)


def _noting_one_value(layer: nnx.BatchNorm, name: Path, of_one_value: set[Path]) -> Callable:
    """The function that a layer calls with its input. It adds `name` to a set if the input has one value of each channel."""
    promote = layer.promote_dtype

    def noting(arrays: tuple, **options: Any) -> Any:
        if _values_of_channel(layer, arrays[0].shape) == 1:
            of_one_value.add(name)
        return promote(arrays, **options)

    return noting


def _values_of_channel(layer: nn.BatchNorm | nnx.BatchNorm, shape: tuple[int, ...]) -> int:
    """The number of values of each channel that a layer averages, on all devices that it synchronizes."""
    channel_axes: Any = layer.axis if isinstance(layer.axis, Iterable) else (layer.axis,)
    channels, groups = math.prod(shape[axis] for axis in channel_axes), layer.axis_index_groups
    devices = 1 if layer.axis_name is None else lax.axis_size(layer.axis_name)
    return math.prod(shape) // channels * (len(groups[0]) if groups else devices)


def _holds_array(module: nnx.Module) -> bool:
    """Whether an attribute is an array and no `Variable`. In a trace, nnx makes it a part of the graph definition."""
    leaves = jax.tree.leaves(list(vars(module).values()), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable | nnx.Module))
    return any(isinstance(leaf, jax.Array) for leaf in leaves)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _names(path: tuple) -> Path:
    """A path in a module as names; lists have integer indices."""
    return tuple(map(str, path))


def _values(module: nnx.Module, kind: Any) -> dict[Path, Any]:
    """Arrays of the variables of a kind, by path."""
    state: Any = nnx.state(module, kind)
    return {_names(path): jax.tree.leaves(variable)[0] for path, variable in nnx.to_flat_state(state)}


def _constants(module: nnx.Module) -> dict[Path, Any]:
    """Arrays that are no parameters, statistics or keys, by path."""
    return _values(module, nnx.Not(nnx.Any(*KINDS[:-1])))


def _with_value(variable: Any, value: Any) -> Any:
    """A copy of a variable with a new value; unchanged for None."""
    return variable if value is None else jax.tree.map(lambda _: value, variable)
