"""The dtype of each parameter after the network's cast, so that no more bits than needed are gathered."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import PartitionSpec

from jaxdp.config import Config, phase_image_size
from jaxdp.network import Network
from jaxdp.parallel.mesh import abstract_mesh

# Operations that move values without computing with them, by their names in a jaxpr.
MOVES = {"broadcast_in_dim", "copy", "pvary", "pcast", "reshape", "rev", "slice", "squeeze", "transpose", "expand_dims"}


def forward_dtypes(config: Config, model: Network, *, params: Any, batch_stats: Any, devices: int) -> Any:
    """For each parameter: `config.model.dtype` if every use, forward and backward, casts it to this dtype, else float32.

    model: is traced, not run. params, batch_stats: shapes and dtypes. devices: their number; it
    divides the global batch of a phase without a per-worker batch. The uses of all phases count, because the form of a network
    may depend on batch and image size.
    """
    forms = {
        (phase.per_worker_batch or max(1, phase.global_batch // devices), phase_image_size(config, index))
        for index, phase in enumerate(config.batch)
    }
    found = [
        _dtypes_of_phase(config, model, params=params, batch_stats=batch_stats, images=images, size=size)
        for images, size in sorted(forms)
    ]
    return jax.tree.map(lambda *dtypes: max(dtypes, key=lambda dtype: dtype.itemsize), *found)


def _dtypes_of_phase(config: Config, model: Network, *, params: Any, batch_stats: Any, images: int, size: int) -> Any:
    wanted = jnp.dtype(config.model.dtype)
    if wanted == jnp.float32:
        return jax.tree.map(lambda _: wanted, params)

    def gradient(params: Any, batch_stats: Any) -> Any:
        key = jax.random.key(0)
        keys = jax.random.split(key, images) if model.draws_for_each_image else key
        x = jnp.zeros((images, size, size, 3), jnp.float32)

        def logits_of(params: Any) -> tuple[jax.Array, Any]:
            return model.apply(params, batch_stats, x, train=True, key=keys)

        logits, vjp_fn, _ = jax.vjp(logits_of, params, has_aux=True)
        return vjp_fn(jnp.ones_like(logits))

    everywhere = PartitionSpec()
    mapped = jax.shard_map(gradient, mesh=abstract_mesh(1, 1), in_specs=everywhere, out_specs=everywhere, check_vma=False)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, batch_stats))
    jaxpr = jax.make_jaxpr(mapped)(*shapes).jaxpr
    leaves, structure = jax.tree.flatten(params)
    uses = _Uses()
    used = [set(uses.dtypes(jaxpr, variable)) for variable in jaxpr.invars[: len(leaves)]]
    return jax.tree.unflatten(structure, [wanted if dtypes <= {wanted} else jnp.dtype(jnp.float32) for dtypes in used])


class _Uses:
    """The uses of variables in a jaxpr and its inner jaxprs; each jaxpr is indexed once."""

    def __init__(self) -> None:
        self.indices: dict[int, dict[Any, list[tuple[Any, int]]]] = {}

    def dtypes(self, jaxpr: Any, variable: Any) -> Iterator[Any]:
        """For each use of a variable, the dtype after its cast; its own for a use that computes with it or returns it."""
        if any(out is variable for out in jaxpr.outvars):
            yield variable.aval.dtype
        for equation, place in self._index(jaxpr).get(variable, ()):
            inner = [*inner_jaxprs(equation)]
            if equation.primitive.name == "convert_element_type":
                yield jnp.dtype(equation.params["new_dtype"])
            elif equation.primitive.name == "reduce_precision":  # rounds to the values of a dtype
                yield _rounded_to(**equation.params)
            elif equation.primitive.name in MOVES:
                yield from (dtype for moved in equation.outvars for dtype in self.dtypes(jaxpr, moved))
            elif inner and all(len(each.invars) == len(equation.invars) for each in inner):  # a call
                yield from (dtype for each in inner for dtype in self.dtypes(each, each.invars[place]))
            else:
                yield variable.aval.dtype

    def _index(self, jaxpr: Any) -> dict[Any, list[tuple[Any, int]]]:
        if id(jaxpr) not in self.indices:
            index: dict[Any, list[tuple[Any, int]]] = {}
            for equation in jaxpr.eqns:
                for place, operand in enumerate(equation.invars):
                    if isinstance(operand, Var):
                        index.setdefault(operand, []).append((equation, place))
            self.indices[id(jaxpr)] = index
        return self.indices[id(jaxpr)]


def _rounded_to(exponent_bits: int, mantissa_bits: int) -> Any:
    """The 16-bit dtype with so many bits; float32 if there is none."""
    sixteen = (jnp.dtype(name) for name in ("bfloat16", "float16"))
    fits = (dtype for dtype in sixteen if (jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant) == (exponent_bits, mantissa_bits))
    return next(fits, jnp.dtype(jnp.float32))


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds: of a scan, a call, the branches of a cond."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner
