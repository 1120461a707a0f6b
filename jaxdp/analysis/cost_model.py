"""The latency-bandwidth model of an all-reduce, and the step time that follows from it.

An exchange of an all-reduce (`Strategy.cost`) takes rounds * latency + bytes / bandwidth (Thakur et al., "Optimization of
Collective Communication Operations in MPICH", 2005). The bytes are those that the busiest device sends, or those that the
busiest host sends to others if these take longer: NCCL sends both at once, in small pieces. In measured steps over gloo
both times count, except in an exchange with a server. Links are full-duplex. No communication overlaps with computation.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdp.errors import ConfigError, one_of
from jaxdp.strategies import STRATEGIES, Exchange

# Mikami et al., arXiv 1811.05233, Table 6: a step of 32 images on each of four GPUs took 49.9025 ms.
V100_IMAGES_PER_SECOND = 32 / 49.9025e-3


class Links(NamedTuple):
    """The links between devices. latency: seconds per round. bandwidth, device_bandwidth: bytes per second.

    bandwidth: of a host's link to other hosts, which its devices share. device_bandwidth: of a device itself, also to the
    devices of its host. gloo: the devices are CPUs, over which gloo runs the collectives: XLA selects its ring for a psum, and
    a reduce-scatter along the rows is an all-to-all.
    """

    latency: float
    bandwidth: float
    device_bandwidth: float = math.inf
    devices_per_host: int = 1
    gloo: bool = False

    def seconds(self, exchange: Exchange, vertical: int, horizontal: int, *, num_bytes: float, scatters: bool = False) -> float:
        """Seconds of an exchange of an all-reduce of `num_bytes` bytes. scatters: it is the reduce-scatter along the rows."""
        among = "pairs" if scatters and self.gloo else exchange.among
        share = leaving_share(among, vertical, horizontal, devices_per_host=self.devices_per_host)
        own = exchange.volume * num_bytes / self.device_bandwidth
        between = share * exchange.volume * num_bytes / self.bandwidth
        return exchange.rounds * self.latency + (own + between if self.gloo and among != "server" else max(own, between))


@functools.cache
def leaving_share(among: str | tuple[tuple[int, int], ...], vertical: int, horizontal: int, *, devices_per_host: int) -> float:
    """Bytes that the busiest host sends to others in an exchange, as a multiple of those that a device sends.

    among: as in `Exchange`, or "pairs" for all pairs of a row. Devices fill the hosts in order.
    """
    if not isinstance(among, str):
        return _leaving_share_of_pairs(np.array(among), devices_per_host)
    mesh = np.arange(vertical * horizontal).reshape(vertical, horizontal)
    if among == "server":
        return max(0, mesh.size - devices_per_host) / (mesh.size - 1)
    if horizontal == 1 and among in {"row", "pairs"}:
        return 0.0
    if among == "devices":
        receivers = [np.roll(mesh.ravel(), -1).reshape(mesh.shape)]
    elif among == "column":
        receivers = [np.roll(mesh, -1, axis=0)]
    else:
        receivers = [np.roll(mesh, -distance, axis=1) for distance in (range(1, horizontal) if among == "pairs" else [1])]
    hosts = mesh // devices_per_host
    leaving = sum((hosts != other // devices_per_host).astype(float) for other in receivers) / len(receivers)  # [Y, X]
    return float(np.bincount(hosts.ravel(), leaving.ravel()).max())


def _leaving_share_of_pairs(pairs: np.ndarray, devices_per_host: int) -> float:
    """`leaving_share` of pairs [P, 2]. Links are full-duplex: what the busiest host receives counts if it is more."""
    hosts = pairs // devices_per_host
    leaving = hosts[hosts[:, 0] != hosts[:, 1]]
    busiest_device = max(np.bincount(side).max() for side in pairs.T)
    return max((np.bincount(side).max() for side in leaving.T if side.size), default=0) / busiest_device


def candidates(strategy: str, vertical: int, horizontal: int) -> list[list[Exchange]]:
    """The exchanges of a strategy's candidate algorithms on a mesh.

    Raises ConfigError for a strategy without a cost.
    """
    known = [name for name, each in STRATEGIES.items() if each.cost]
    if strategy not in known:
        raise one_of("strategy", strategy, known)
    cost = STRATEGIES[strategy].cost
    return cost(vertical, horizontal) if cost and vertical * horizontal > 1 else [[]]


class Cost(NamedTuple):
    """An all-reduce of n bytes takes `rounds` * latency + `volume` * n / bandwidth seconds on devices with a link each."""

    rounds: int
    volume: float


def cost_terms(strategy: str, vertical: int, horizontal: int) -> list[Cost]:
    """The cost of each candidate algorithm. Raises ConfigError for a strategy without a cost."""
    return [
        Cost(sum(one.rounds for one in exchanges), sum(one.volume for one in exchanges))
        for exchanges in candidates(strategy, vertical, horizontal)
    ]


def allreduce_seconds(strategy: str, vertical: int, horizontal: int, *, num_bytes: float, network: Links) -> float:
    """Seconds for the all-reduce of `num_bytes` bytes per device."""
    scatters = STRATEGIES[strategy].scatters if strategy in STRATEGIES else False
    algorithm = "ring" if network.gloo and strategy == "psum" else strategy
    return min(
        sum(
            network.seconds(one, vertical, horizontal, num_bytes=num_bytes, scatters=scatters and index == 0)
            for index, one in enumerate(exchanges)
        )
        for exchanges in candidates(algorithm, vertical, horizontal)
    )


def sharded_update_seconds(
    strategy: str, vertical: int, horizontal: int, *, gradient_bytes: float, parameter_bytes: float, network: Links
) -> float:
    """Seconds of a message of a step with a sharded update: the reduction without its last stage, and the gather of parameters.

    gradient_bytes, parameter_bytes: of whole tensors, 0 for a message of the other kind only. Raises ConfigError for a strategy
    that does not scatter.
    """
    able = [name for name, each in STRATEGIES.items() if each.cost and each.scatters]
    if strategy not in able:
        raise one_of("strategy", strategy, able)
    if vertical * horizontal == 1:
        return 0.0
    ((*_, gather),) = candidates(strategy, vertical, horizontal)
    reduction = 0.0
    if gradient_bytes:
        whole = allreduce_seconds(strategy, vertical, horizontal, num_bytes=gradient_bytes, network=network)
        reduction = whole - network.seconds(gather, vertical, horizontal, num_bytes=gradient_bytes)
    gathering = network.seconds(gather, vertical, horizontal, num_bytes=parameter_bytes) if parameter_bytes else 0.0
    return reduction + gathering


def step_seconds(one_device_seconds: float, devices: int, communication_seconds: float) -> float:
    """T_N = T_1 / N + T_comm: evenly divided computation, then communication, without overlap."""
    return one_device_seconds / devices + communication_seconds


def turning_points(
    one_device_seconds: float, communication: Callable[[int], float], counts: list[int]
) -> tuple[int | None, int | None]:
    """(devices from which doubling them gains less than half of the ideal, devices with the shortest step), for a fixed batch.

    communication: devices -> seconds. counts: powers of two that can share the batch. The first is the smallest N with
    T_N / T_2N < 1.5. A value is None if it lies beyond `counts`.
    """
    seconds = {n: step_seconds(one_device_seconds, n, communication(n)) for n in counts}
    diminishing = next((n for n in counts[:-1] if seconds[n] / seconds[2 * n] < 1.5), None)
    fastest = min(counts, key=seconds.__getitem__)
    return diminishing, None if fastest == counts[-1] else fastest


def parse_network(text: str) -> Links:
    """The network of "latency,bandwidth" or "latency,bandwidth,device bandwidth". Raises ConfigError for other text."""
    try:
        latency, *bandwidths = (float(part) for part in text.split(","))
    except ValueError:
        latency, bandwidths = math.nan, []
    if not (0 <= latency < math.inf and len(bandwidths) in (1, 2) and all(0 < one < math.inf for one in bandwidths)):
        raise ConfigError(
            "--network",
            text,
            reason="must be LATENCY,BANDWIDTH or LATENCY,BANDWIDTH,DEVICE: seconds (0 or more) and bytes per second (positive)",
            hint="for example 5e-6,10e9",
        )
    return Links(latency, bandwidths[0], device_bandwidth=bandwidths[1] if len(bandwidths) > 1 else math.inf)
