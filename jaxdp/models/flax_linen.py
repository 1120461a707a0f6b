"""A `flax.linen` module as a network: `params` are trained, the statistics of `BatchNorm` averaged over workers."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from jaxdp.models.batch_norm import count_values
from jaxdp.models.stages import (
    Path,
    UnusableModule,
    check_stages,
    declares_stages,
    foreign_statistics,
    join_stages,
    mode_arguments,
    moments_of,
    segments_of,
    split_by_stage,
    without_empty,
)
from jaxdp.parallel.mesh import AXES

COLLECTIONS = {"params", "batch_stats"}


class LinenNet:
    """A linen module as a network. norm: "per_worker" or "synchronized". See `jaxdp.models.registered.Net`."""

    def __init__(self, module: nn.Module, norm: str) -> None:
        self.module, self.axes = module, AXES if norm == "synchronized" else None
        self.paths: tuple[Path, ...] = ((),)
        if declares_stages(module):
            found: list[Path | None] = []

            def collect(module: Any) -> None:
                found.extend(stage.path if isinstance(stage, nn.Module) else None for stage in module.stages())

            jax.eval_shape(lambda key: module.init({"params": key}, method=collect), jax.random.key(0))
            self.paths = check_stages(found)
        self.segments = segments_of(self.paths)

    def init(self, key: jax.Array, image_shape: tuple[int, int, int]) -> tuple[dict, dict]:
        """(params, batch_stats), trees by segment."""
        images = jnp.zeros((1, *image_shape), jnp.float32)

        def run(module: nn.Module, x: Any) -> Any:
            for index in range(len(self.paths)):
                x = self._call(module, x, index=index, train=False)
            return x

        variables = meta.unbox(self.module.init({"params": key}, images, method=run))
        if unknown := sorted(variables.keys() - COLLECTIONS):
            raise UnusableModule(
                f"the module has a collection {unknown[0]!r}, which a run cannot keep", "use params and batch_stats alone"
            )
        params = split_by_stage(variables.get("params", {}), self.paths)
        return params, without_empty(split_by_stage(variables.get("batch_stats", {}), self.paths))

    def apply_segment(
        self, params: dict, batch_stats: dict, x: Any, *, index: int, train: bool, key: jax.Array | None
    ) -> tuple[Any, dict]:
        """(output of a segment, moments)."""
        path = self.paths[index : index + 1]
        variables = {"params": join_stages(params, path), "batch_stats": join_stages(batch_stats, path)}

        def run(module: nn.Module, x: Any) -> Any:
            return self._call(module, x, index=index, train=train)

        normalized: set[Path] = set()
        rngs = None if key is None else dict(zip(("dropout", "params"), jax.random.split(key), strict=True))
        with batch_statistics_of_one_batch(self.axes, train, normalized):
            if not train:
                return self.module.apply(variables, x, method=run), {}
            y, changed = self.module.apply(variables, x, method=run, rngs=rngs, mutable=["batch_stats"])
        statistics = changed.get("batch_stats", {})
        for leaf, _ in jax.tree.leaves_with_path(statistics):
            names = tuple(str(part.key) for part in leaf)
            if names[:-1] not in normalized:
                raise foreign_statistics("/".join(names))
        return y, moments_of(without_empty(split_by_stage(statistics, path)))

    def _call(self, module: nn.Module, x: Any, *, index: int, train: bool) -> Any:
        """The output of a stage of the bound module; of the module itself if it declares no stages."""
        called: Any = module.stages()[index] if self.paths != ((),) else module
        return called(x, **mode_arguments(called.__call__, train))


def batch_statistics_of_one_batch(axes: Any, train: bool, normalized: set[Path]) -> AbstractContextManager:
    """A context in which `nn.BatchNorm` stores, in training, the mean and variance of the batch instead of moving averages.

    axes: mesh axes over which they are synchronized; None keeps each layer's own. Adds the path of every layer that is called
    to `normalized`. Calls raise UnusableModule if a layer uses running averages in training, or does not in evaluation.
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
            raise UnusableModule(
                f"{'/'.join(layer.path)} has use_running_average={train} in {'training' if train else 'evaluation'}",
                "give __call__ of the module a parameter train, and the layer use_running_average=not train",
            )
        if not train:
            return next_fun(*args, **kwargs)
        copy = layer.clone(parent=None, name=None, momentum=0.0, axis_name=axes or layer.axis_name)
        count_values("/".join(layer.path), next(iter(given.values())).shape, channels=layer.axis, axes=copy.axis_name)
        y, changed = copy.apply(layer.variables, *args, **kwargs, mutable=["batch_stats"])
        for name, value in changed["batch_stats"].items():
            layer.put_variable("batch_stats", name, value)
        return y

    return nn.intercept_methods(intercept)
