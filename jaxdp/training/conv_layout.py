"""The order in memory of convolution kernels on the devices.

Shapes, checkpoints and exported weights do not depend on it.
"""

from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh

from jaxdp.config import Config
from jaxdp.training.state import from_host, replicated

# Axes of [H, W, I, O] from the outermost to the innermost, by value of `compile.conv_layout`; None: JAX's order.
LAYOUTS: dict[str, tuple[int, ...] | None] = {"hwio": None, "ohwi": (3, 0, 1, 2)}


def is_default(config: Config, mesh: Mesh | AbstractMesh) -> bool:
    """Whether all arrays have JAX's order, as without devices."""
    return LAYOUTS[config.compile.conv_layout] is None or isinstance(mesh, AbstractMesh)


def formats(config: Config, tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The sharding of every array of a replicated tree, with the layout of convolution kernels if it is not JAX's own."""
    order, whole = None if is_default(config, mesh) else LAYOUTS[config.compile.conv_layout], replicated(mesh)
    if order is None:
        return jax.tree.map(lambda _: whole, tree)
    in_order = Format(Layout(order), whole)
    return jax.tree.map(lambda leaf: in_order if leaf.ndim == len(order) else whole, tree)


def with_layout(config: Config, abstract: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The shapes and dtypes of a replicated tree, with the layout of convolution kernels."""
    return jax.tree.map(
        lambda leaf, wanted: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=wanted),
        abstract,
        formats(config, abstract, mesh),
    )


def place(config: Config, tree: Any, mesh: Mesh) -> Any:
    """A replicated tree on a mesh, of which every process has at least one device, with the layout of convolution kernels.

    Arrays that are there already are not copied.
    """
    is_there = all(leaf.sharding == replicated(mesh) for leaf in jax.tree.leaves(tree))
    if is_default(config, mesh):
        return tree if is_there else _move(tree, mesh)
    wanted = formats(config, tree, mesh)
    if is_there and all(jax.tree.leaves(jax.tree.map(_has_layout, tree, wanted))):
        return tree
    if not is_there:
        # Through the host: JAX 0.10's device_put gives an array of another layout wrong values on new devices.
        tree = jax.tree.map(lambda leaf: from_host(leaf.addressable_data(0), mesh), tree)
    return jax.jit(lambda arrays: arrays, out_shardings=wanted)(tree)


def _has_layout(leaf: Any, wanted: Any) -> bool:
    default = tuple(range(leaf.ndim))
    layout: Any = wanted.layout if isinstance(wanted, Format) else None
    return tuple(leaf.format.layout.major_to_minor) == (layout.major_to_minor if layout else default)


def _move(tree: Any, mesh: Mesh) -> Any:
    if not mesh.is_multi_process:
        return jax.device_put(tree, replicated(mesh))

    def move(leaf: jax.Array) -> jax.Array:
        copies = [jax.device_put(leaf.addressable_data(0), device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(leaf.shape, replicated(mesh), copies)

    return jax.tree.map(move, tree)
