"""What an all-reduce costs on a network of one latency and one bandwidth, and what that leaves of a speed-up.

Every strategy is `rounds * latency + volume * bytes / bandwidth`, one message at a time on each link and none hidden behind
computation (Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005).
"""

import math

from jaxdp.config import ConfigError

STRATEGIES = ("psum", "ring", "hierarchical", "torus", "parameter_server")

# Mikami et al., arXiv 1811.05233, Table 6: GPUs -> (vertical, horizontal, seconds a step of 32 images a GPU).
TABLE_6 = {
    4: (2, 2, 49.9025e-3),
    1024: (32, 32, 58.8800e-3),
    2048: (32, 64, 60.0500e-3),
    3456: (48, 72, 67.3580e-3),
    4096: (64, 64, 67.9463e-3),
}
TABLE_6_IMAGES_PER_SECOND = 32 / TABLE_6[4][2]
TABLE_6_CAUTION = (
    "Four points and two unknowns: a ring's rounds fit them as well as a torus's, and bandwidth cannot be told from them. "
    "A check of the arithmetic, no proof that the torus is faster."
)


def terms(strategy: str, vertical: int, horizontal: int, servers: int = 1) -> list[tuple[int, float]]:
    """(rounds, volume) of a strategy's all-reduce on a mesh; volume: messages' worth of bytes that pass the busiest link.

    torus (Mikami et al., section 2.2, with the vertical rounds that the text leaves out): rounds 2(X-1) + 2(Y-1), the vertical
    message being 1/X of the whole. hierarchical: the same rounds, the whole message both times. ring: 2(N-1) rounds of 1/N.
    parameter_server: all messages pass the server's link, in and out, divided over `servers`. psum: whatever the library
    takes, so both a ring and a double binary tree (Sanders et al., 2009) are listed, of which the faster counts.
    """
    devices = vertical * horizontal
    if devices == 1:
        return [(0, 0.0)]
    along, across = horizontal - 1, vertical - 1
    ring = (2 * (devices - 1), 2 * (devices - 1) / devices)
    if strategy == "psum":
        return [ring, (2 * math.ceil(math.log2(devices)), 2.0)]
    if strategy == "ring":
        return [ring]
    if strategy == "torus":
        return [(2 * along + 2 * across, 2 * along / horizontal + 2 * across / devices)]
    if strategy == "hierarchical":
        return [(2 * along + 2 * across, 2 * along / horizontal + 2 * across / vertical)]
    if strategy == "parameter_server":
        return [(2, 2 * devices / servers)]
    raise ValueError(f"strategy: {strategy!r} is not allowed; give one of {', '.join(STRATEGIES)}")


def allreduce_seconds(
    strategy: str, vertical: int, horizontal: int, num_bytes: float, latency: float, bandwidth: float, servers: int = 1
) -> float:
    """Seconds for the mean of `num_bytes` bytes a device; latency in seconds a round, bandwidth in bytes a second a link."""
    return min(
        rounds * latency + volume * num_bytes / bandwidth
        for rounds, volume in terms(strategy, vertical, horizontal, servers=servers)
    )


def step_seconds(one_device_seconds: float, devices: int, communication_seconds: float) -> float:
    """T_N = T_1 / N + T_comm: computation shared evenly, then communication, neither hiding the other."""
    return one_device_seconds / devices + communication_seconds


def speed_up(one_device_seconds: float, devices: int, communication_seconds: float) -> float:
    """T_1 / T_N; divided by N it is the efficiency."""
    return one_device_seconds / step_seconds(one_device_seconds, devices, communication_seconds)


def turning_points(one_device_seconds: float, communication, counts: list[int]) -> tuple[int | None, int | None]:
    """(devices from which a doubling gains less than half of what it should, devices with the shortest step) of `counts`.

    For a batch whose size does not grow with the devices; counts: powers of two that can share it. communication: devices ->
    seconds. The first is the smallest N with T_N / T_2N < 1.5; None where that, or the shortest step, lies beyond `counts`.
    """
    seconds = {n: step_seconds(one_device_seconds, n, communication(n)) for n in counts}
    diminishing = next((n for n in counts[:-1] if seconds[n] / seconds[2 * n] < 1.5), None)
    fastest = min(counts, key=seconds.get)
    return diminishing, None if fastest == counts[-1] else fastest


def parse_network(text: str) -> tuple[float, float]:
    """(latency in seconds, bandwidth in bytes a second) of "latency,bandwidth". Raises ConfigError for anything else."""
    parts = text.split(",")
    try:
        latency, bandwidth = (float(part) for part in parts)
    except ValueError:
        latency = bandwidth = math.nan
    if not (0 <= latency < math.inf and 0 < bandwidth < math.inf):
        raise ConfigError(
            f"--network: {text!r} is not allowed; give latency,bandwidth: seconds (0 or more) and bytes a second (above 0), "
            "for example 5e-6,10e9"
        )
    return latency, bandwidth


def fit_table_6(strategy: str) -> dict:
    """Table 6 as T(4) + latency * rounds + constant, by least squares: {"latency", "constant", "errors"}; seconds, shares.

    errors: measured / predicted - 1 at 1,024, 2,048, 3,456 and 4,096 GPUs.
    """
    import numpy as np

    base = TABLE_6[4][2]
    rows = [(terms(strategy, vertical, horizontal)[0][0], seconds) for vertical, horizontal, seconds in TABLE_6.values()][1:]
    rounds, seconds = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    design = np.stack([rounds, np.ones_like(rounds)], axis=1)
    (latency, constant), *_ = np.linalg.lstsq(design, seconds - base, rcond=None)
    predicted = base + design @ [latency, constant]
    return {"latency": float(latency), "constant": float(constant), "errors": [float(e) for e in seconds / predicted - 1]}
