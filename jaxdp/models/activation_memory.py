"""Memory of a network's activations, from an abstract trace: what the forward pass keeps for the backward pass."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var
from jax.sharding import PartitionSpec

from jaxdp import models
from jaxdp.config import RESNET
from jaxdp.config import Model as ModelConfig
from jaxdp.parallel.mesh import abstract_mesh

CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
PRODUCTS = {"conv_general_dilated", "dot_general"}  # XLA does not fuse the operations before them, so their operands are arrays
ELEMENTWISE = """
    abs add add_any and broadcast_in_dim ceil clamp convert_element_type copy cos div eq erf erf_inv exp exp2 expand_dims expm1
    floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not one_minus_square or pow pcast pvary
    reduce_precision rem reshape round rsqrt select_n sign sin sqrt square squeeze stop_gradient sub tanh transpose xor
""".split()  # noqa: SIM905 - XLA fuses them into the operations that use their results
BATCH = 64  # of the trace; the memory of values that do not depend on the batch, such as means, is divided by it


def activation_bytes(config: ModelConfig, image_shape: tuple[int, int, int], frozen_stages: int = 0) -> int:
    """Bytes of activations per image at the peak of a step on a device, estimated.

    Counts every array that the backward pass refers to and that XLA cannot recompute from others by elementwise operations.
    Temporaries are not included. With `remat`, the peak is in the backward pass of a segment, which recomputes its activations.
    """
    # The trace of a ResNet takes a second. A registered name can get another model, so nothing is kept for it.
    by_segment = _bytes_of_resnet if config.name == RESNET else _bytes_by_segment
    kept = by_segment(config, image_shape, frozen_stages)
    if not config.remat:
        return sum(kept)
    recomputed = by_segment(dataclasses.replace(config, remat=False), image_shape, frozen_stages)
    return max(before + own for before, own in zip(itertools.accumulate(kept), recomputed, strict=True))


def _bytes_by_segment(config: ModelConfig, image_shape: tuple[int, int, int], frozen_stages: int) -> list[int]:
    """Bytes per image that the backward pass of each trained segment needs; an array counts for the first such segment."""
    model = models.create(config, platform="any")
    frozen, trainable = model.split_frozen(frozen_stages)

    def vjp_fns(params: dict, batch_stats: dict, x: jax.Array) -> list[Any]:
        """The backward pass of every segment: functions that are trees of the arrays that they need."""
        functions = []
        for segment in frozen:
            x, _ = model.apply_segment(params, batch_stats, x, segment=segment, train=False)
        for segment in trainable:

            def forward(params: dict, x: jax.Array, segment: tuple[str, ...] = segment) -> tuple[jax.Array, dict]:
                return model.apply_segment(params, batch_stats, x, segment=segment, key=jax.random.key(0))

            x, vjp_fn, _ = jax.vjp(forward, {name: params[name] for name in segment}, x, has_aux=True)
            functions.append(vjp_fn)
        return functions

    sizes: list[int] = []

    def trace(params: dict, batch_stats: dict, x: jax.Array) -> None:  # inside shard_map: a network may use the mesh's axes
        closed, functions = jax.make_jaxpr(vjp_fns, return_shape=True)(params, batch_stats, x)
        inputs: list[frozenset] = [frozenset() for _ in closed.jaxpr.invars]  # parameters are no activations
        inputs[-1] = frozenset({closed.jaxpr.invars[-1]})
        residuals = zip(closed.jaxpr.outvars, _stored(closed.jaxpr, inputs), strict=True)
        parts = [itertools.islice(residuals, len(jax.tree.leaves(function))) for function in functions]
        by_segment = [[(array, origins) for array, origins in part if origins] for part in parts]  # not literals or parameters
        arrays = {variable for segment in by_segment for variable, origins in segment if origins == {variable}}
        counted: set[Any] = set()
        for segment in by_segment:
            new: set[Any] = set()
            for variable, origins in segment:
                if variable in arrays:
                    new.add(variable)
                elif missing := origins - arrays - counted - new:
                    new |= min(missing, {variable}, key=_size)
            new -= counted
            counted |= new
            sizes.append(_size(new) // BATCH)

    images = jax.ShapeDtypeStruct((BATCH, *image_shape), jnp.float32)
    params, batch_stats = models.initial_shapes(model, image_shape)
    everywhere = PartitionSpec()
    mapped = jax.shard_map(trace, mesh=abstract_mesh(1, 1), in_specs=everywhere, out_specs=everywhere, check_vma=False)
    jax.eval_shape(mapped, params, batch_stats, images)
    return sizes


_bytes_of_resnet = cache(_bytes_by_segment)


def _size(variables: Iterable[Any]) -> int:
    return sum(math.prod(variable.aval.shape) * variable.aval.dtype.itemsize for variable in variables)


def _stored(jaxpr: Jaxpr, inputs: Sequence[frozenset[Var]]) -> list[frozenset[Var]]:
    """For each output of a jaxpr, the variables from which elementwise operations make it. inputs: the same of its inputs."""
    origins: dict[Var, frozenset[Var]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def origin(variable: Any) -> frozenset[Var]:
        return origins.get(variable, frozenset()) if isinstance(variable, Var) else frozenset()

    operands = {
        v for equation in jaxpr.eqns if equation.primitive.name in PRODUCTS for v in equation.invars if isinstance(v, Var)
    }
    for equation in jaxpr.eqns:
        sources = [origin(variable) for variable in equation.invars]
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        outputs: Sequence[frozenset[Var]]
        if equation.primitive.name in CALLS and inner is not None and len(inner.invars) == len(sources):
            outputs = _stored(inner, sources)
            outputs = [
                frozenset({variable}) if variable in operands else each
                for variable, each in zip(equation.outvars, outputs, strict=True)
            ]
        elif equation.primitive.name in ELEMENTWISE and operands.isdisjoint(equation.outvars):
            outputs = [frozenset().union(*sources)] * len(equation.outvars)
        else:
            outputs = [frozenset({variable}) for variable in equation.outvars]
        origins |= dict(zip(equation.outvars, outputs, strict=True))
    return [origin(variable) for variable in jaxpr.outvars]
