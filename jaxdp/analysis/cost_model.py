"""The latency-bandwidth model of an all-reduce, and the step time and speed-up that follow from it.

An all-reduce takes rounds * latency + volume * bytes / bandwidth (`Strategy.cost`; Thakur et al., "Optimization of Collective
Communication Operations in MPICH", 2005). Each device has one full-duplex link of this bandwidth and sends one message at a
time. No communication overlaps with computation. The parameter server is ideal: it receives from all
devices in one round and then sends to all in another, so both directions count.
"""

import math
from collections.abc import Callable

from jaxdp.errors import ConfigError, one_of
from jaxdp.strategies import STRATEGIES, Cost

# Mikami et al., arXiv 1811.05233, Table 6: a step of 32 images on each of four GPUs took 49.9025 ms.
V100_IMAGES_PER_SECOND = 32 / 49.9025e-3


def cost_terms(strategy: str, vertical: int, horizontal: int) -> list[Cost]:
    """The costs of a strategy's candidate algorithms on a mesh; the model uses the fastest.

    Raises ConfigError for a strategy without a cost.
    """
    known = [name for name, each in STRATEGIES.items() if each.cost]
    if strategy not in known:
        raise one_of("strategy", strategy, known)
    if vertical * horizontal == 1:
        return [Cost(0, 0.0)]
    cost = STRATEGIES[strategy].cost
    return cost(vertical, horizontal) if cost else []


def allreduce_seconds(
    strategy: str, vertical: int, horizontal: int, *, num_bytes: float, latency: float, bandwidth: float
) -> float:
    """Seconds for the all-reduce of `num_bytes` bytes per device.

    latency: seconds per round. bandwidth: bytes/s of a device's link.
    """
    costs = cost_terms(strategy, vertical, horizontal)
    return min(rounds * latency + volume * num_bytes / bandwidth for rounds, volume in costs)


def sharded_update_seconds(
    strategy: str,
    vertical: int,
    horizontal: int,
    *,
    gradient_bytes: float,
    parameter_bytes: float,
    latency: float,
    bandwidth: float,
) -> float:
    """Seconds of a message of a step with a sharded update: the reduction without its last stage, and that of parameters.

    gradient_bytes, parameter_bytes: of whole tensors, 0 for a message of the other kind only. Raises ConfigError for a strategy
    without `gather_cost`.
    """
    able = [name for name, each in STRATEGIES.items() if each.gather_cost]
    gather_cost = STRATEGIES[strategy].gather_cost if strategy in able else None
    if gather_cost is None:
        raise one_of("strategy", strategy, able)
    if vertical * horizontal == 1:
        return 0.0
    gather = gather_cost(vertical, horizontal)
    reduction = cost_terms(strategy, vertical, horizontal)[0]
    seconds = 0.0
    if gradient_bytes:
        rounds, volume = reduction.rounds - gather.rounds, reduction.volume - gather.volume
        seconds += rounds * latency + volume * gradient_bytes / bandwidth
    if parameter_bytes:
        seconds += gather.rounds * latency + gather.volume * parameter_bytes / bandwidth
    return seconds


def step_seconds(one_device_seconds: float, devices: int, communication_seconds: float) -> float:
    """T_N = T_1 / N + T_comm: evenly divided computation, then communication, without overlap."""
    return one_device_seconds / devices + communication_seconds


def speed_up(one_device_seconds: float, devices: int, communication_seconds: float) -> float:
    """T_1 / T_N. The efficiency is speed_up / N."""
    return one_device_seconds / step_seconds(one_device_seconds, devices, communication_seconds)


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


def parse_network(text: str) -> tuple[float, float]:
    """(latency in seconds, bandwidth in bytes/s) of "latency,bandwidth". Raises ConfigError for other text."""
    try:
        latency, bandwidth = (float(part) for part in text.split(","))
    except ValueError:
        latency = bandwidth = math.nan
    if not (0 <= latency < math.inf and 0 < bandwidth < math.inf):
        raise ConfigError(
            "--network",
            text,
            reason="must be LATENCY,BANDWIDTH: seconds (0 or more) and bytes per second (positive)",
            hint="for example 5e-6,10e9",
        )
    return latency, bandwidth
