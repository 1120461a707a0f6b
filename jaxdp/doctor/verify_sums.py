"""Proofs of reductions: every strategy computes exact sums of messages as large as the recipe's gradient."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxdp import models
from jaxdp.config import Config
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.doctor.proof import Proof, build_on_all_ranks, prove
from jaxdp.errors import ConfigError
from jaxdp.parallel import timing
from jaxdp.parallel.mesh import choose_shape, make_mesh, most_square
from jaxdp.strategies import STRATEGIES, unsupported_reason

CALLS = 3


def mesh_shape(config: Config, devices: int, processes: int) -> tuple[int, int]:
    """The recipe's mesh shape if it fits the devices, else the most square one of all of them."""
    try:
        return choose_shape(config.mesh, devices, processes)
    except ConfigError:
        return most_square(devices)


def proofs(
    config: Config, devices: Sequence[jax.Device], *, info: Callable[[str], None], group: ProcessGroup
) -> Iterator[Proof]:
    """For every strategy: sum the gradient as one message in the recipe's wire dtype, `CALLS` times.

    The messages are integers whose sum is exact; the sums are compared bit by bit on all devices.
    """
    size = config.data.image_size
    model = models.create(config.model)
    shapes, _ = models.initial_shapes(model, (size, size, 3))
    elements = sum(leaf.size for leaf in jax.tree.leaves(model.trainable(shapes, config.finetune.frozen_stages)))
    message = jax.ShapeDtypeStruct((elements,), jnp.dtype(config.reduce.wire_dtype))
    shape = mesh_shape(config, len(devices), group.num_processes)
    mesh = make_mesh(*shape, devices)
    text = f"{elements * message.dtype.itemsize:,} bytes of {message.dtype}"
    info(f"exact sums: messages of {text} on {shape[0]}x{shape[1]} ...")

    def count_wrong_sums(strategy: str, name: str) -> int:
        def build() -> timing.Reduction:
            return timing.Reduction(mesh, message, strategy, bucket_bytes=None, compile=config.compile)

        reduction = build_on_all_ranks(group, name, build)
        return sum(not reduction.is_exact(reduction()) for _ in range(CALLS))

    for strategy in STRATEGIES:
        if unsupported_reason(strategy, mesh.size):
            continue
        name = f"exact sums: {strategy} on {shape[0]}x{shape[1]}"
        yield prove(
            name,
            f"wrong results of {CALLS} calls, {text}",
            tolerance=0,
            difference=partial(count_wrong_sums, strategy, name),
            group=group,
        )
