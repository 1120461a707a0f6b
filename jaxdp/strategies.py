"""The table of all-reduce strategies: what can be verified of each, where it runs, and what it costs.

`jaxdp.parallel.allreduce` implements them. This module does not import JAX, so a config is validated without it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from jaxdp.errors import plural
from jaxdp.registry import Choice, Choices, LazyModule

if TYPE_CHECKING:
    import jax

    from jaxdp.parallel import allreduce
else:
    allreduce = LazyModule("jaxdp.parallel.allreduce")

# A function from one flat vector to one flat vector, called inside `shard_map` over both mesh axes.
Stage = Callable[["jax.Array"], "jax.Array"]


class Exchange(NamedTuple):
    """A part of an all-reduce of n bytes, whose devices all begin at the same time.

    among: who exchanges: devices of a "row" or of a "column", or all "devices", each with the next one in a ring; or each
    device with the "server", the first one. Or the pairs (sender, receiver) of devices, such as one level of a
    tree over hosts; all send equally much to each receiver.
    rounds: exchanges that wait for the previous one. volume: bytes that the busiest device sends, or receives if these are
    more, as a multiple of n; the server sends after it has received everything, so both directions count.
    """

    among: Literal["row", "column", "devices", "server"] | tuple[tuple[int, int], ...]
    rounds: int
    volume: float


@dataclass(frozen=True, kw_only=True)
class Strategy(Choice):
    """An all-reduce strategy. Its implementation is a tuple of its stages, functions that are applied in order.

    Together they turn each device's vector [n] into the sum over all devices, in the first n elements.

    check_vma: passed to `jax.shard_map`, which then verifies that all devices end with the same values; False for
        point-to-point exchange, which JAX cannot verify.
    scatters: the first stage is a reduce-scatter along the rows, and the last one the all-gather along the rows; in between,
        each device has its shard of the row's sum. `reduce.update sharded` leaves out the last stage.
    sums_along_axes: on a mesh of Y rows of X devices, every contribution passes through at most X + Y - 2 additions, because
        rows and columns are summed one after the other; False for up to N - 1. Audits derive their bound from it.
    max_devices: the largest number of devices; None for no limit.
    cost: (vertical, horizontal) -> candidate algorithms, each a list of exchanges, one after another; the model uses the
        fastest. A strategy that scatters has an exchange for each stage. None if the cost is unknown.
    """

    check_vma: bool = False
    scatters: bool = False
    sums_along_axes: bool = False
    max_devices: int | None = None
    cost: Callable[[int, int], list[list[Exchange]]] | None = None

    def max_additions(self, vertical: int, horizontal: int) -> int:
        """The largest number of additions that a device's contribution passes through, one after another."""
        return vertical + horizontal - 2 if self.sums_along_axes else vertical * horizontal - 1


def ring_exchange(among: Literal["row", "column", "devices"], devices: int) -> Exchange:
    """An all-reduce in a ring of `devices` devices."""
    return Exchange(among, 2 * (devices - 1), 2 * (devices - 1) / devices)


def _ring_cost(vertical: int, horizontal: int) -> list[list[Exchange]]:
    return [[ring_exchange("devices", vertical * horizontal)]]


def _psum_cost(vertical: int, horizontal: int) -> list[list[Exchange]]:
    """A ring or a double binary tree (Sanders et al., 2009): the library chooses."""
    return [*_ring_cost(vertical, horizontal), [Exchange("devices", 2 * math.ceil(math.log2(vertical * horizontal)), 2.0)]]


def _hierarchical_cost(vertical: int, horizontal: int) -> list[list[Exchange]]:
    return [[ring_exchange("row", horizontal), ring_exchange("column", vertical)]]


def _torus_cost(vertical: int, horizontal: int) -> list[list[Exchange]]:
    """Mikami et al., section 2.2, with the vertical rounds that the text omits; the vertical message is 1/X of the vector."""
    rows, columns = horizontal - 1, vertical - 1
    along_rows = Exchange("row", rows, rows / horizontal)
    return [[along_rows, Exchange("column", 2 * columns, 2 * columns / (vertical * horizontal)), along_rows]]


def _parameter_server_cost(vertical: int, horizontal: int) -> list[list[Exchange]]:
    """A server that receives one gradient after another over its link, then sends one result after another."""
    others = vertical * horizontal - 1
    return [[Exchange("server", 2 * others, 2 * others)]]


STRATEGIES = Choices(
    "reduce.strategy",
    {
        "psum": Strategy(
            "algorithm chosen by XLA",
            implementation=lambda: (allreduce.psum,),
            check_vma=True,
            cost=_psum_cost,
        ),
        "ring": Strategy(
            "exchange with the next device",
            implementation=lambda: (allreduce.ring,),
            cost=_ring_cost,
        ),
        # Jia et al., arXiv 1807.11205. There one master per row takes part in the second stage. In an SPMD program every device
        # does, so all columns carry the whole vector at once and nothing has to be broadcast along the rows.
        "hierarchical": Strategy(
            "all-reduce along rows, then along columns",
            implementation=lambda: (allreduce.all_reduce_rows, allreduce.all_reduce_columns),
            check_vma=True,
            sums_along_axes=True,
            cost=_hierarchical_cost,
        ),
        # The 2D-torus all-reduce of Mikami et al., arXiv 1811.05233, section 2.2.
        "torus": Strategy(
            "reduce-scatter along rows, all-reduce along columns, all-gather along rows",
            implementation=lambda: (allreduce.reduce_scatter_rows, allreduce.all_reduce_columns, allreduce.all_gather_rows),
            check_vma=True,
            scatters=True,
            sums_along_axes=True,
            cost=_torus_cost,
        ),
        "parameter_server": Strategy(
            "exchange through one device",
            implementation=lambda: (allreduce.parameter_server,),
            max_devices=64,
            cost=_parameter_server_cost,
        ),
    },
    function="register_strategy",
)


def unsupported_reason(name: object, devices: int) -> str | None:
    """Why a strategy cannot run on this number of devices, or None; None too for names that are not in the table."""
    strategy = STRATEGIES.get(name) if isinstance(name, str) else None
    if strategy is None or strategy.max_devices is None or devices <= strategy.max_devices:
        return None
    return f"{name} supports at most {plural(strategy.max_devices, 'device')}"
