"""Time of communication on a network, and the step time and efficiency of a plan that follow from it, for every strategy.

An exchange of an all-reduce (`Strategy.cost`) takes rounds * latency + bytes / bandwidth (Thakur et al., "Optimization of
Collective Communication Operations in MPICH", 2005). The bytes are those that the busiest device sends, or those that the
busiest host sends to others if these take longer: NCCL sends both at once, in small pieces. In measured steps over gloo
both times count, except in an exchange with a server. Links are full-duplex. No communication overlaps with computation.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxdp.analysis.tpu_targets import TPU_TARGETS
from jaxdp.config import Mesh
from jaxdp.errors import ConfigError, one_of, plural
from jaxdp.parallel.mesh import choose_shape, default_shape
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.strategies import STRATEGIES, Exchange, ring_exchange, unsupported_reason

if TYPE_CHECKING:
    from rich.table import Table

RESNET50_MACS = 4_089_184_256  # multiply-adds of an image of 224 pixels
MAX_DEVICES = 16_384
COLUMNS = ("strategy", "all-reduce", "step", "efficiency", "images/s", "diminishing returns from", "fastest at")
DEVICE_COUNTS = [2**power for power in range(MAX_DEVICES.bit_length())]
# Mikami et al., arXiv 1811.05233, Table 6: a step of 32 images on each of four GPUs took 49.9025 ms.
V100_IMAGES_PER_SECOND = 32 / 49.9025e-3


class Links(NamedTuple):
    """The links between devices. latency: seconds per round. bandwidth, device_bandwidth: bytes per second.

    bandwidth: of a host's link to other hosts, which its devices share. device_bandwidth: of a device itself, also to the
    devices of its host. gloo: the devices are CPUs, over which gloo runs the collectives: XLA selects its ring for a psum, and
    a reduce-scatter along the rows is an all-to-all. tpu: name in `ICI`; chips do not share links. hops: links of a round.
    """

    latency: float
    bandwidth: float
    device_bandwidth: float = math.inf
    devices_per_host: int = 1
    gloo: bool = False
    tpu: str | None = None
    hops: int = 1

    def seconds(self, exchange: Exchange, vertical: int, horizontal: int, *, num_bytes: float, scatters: bool = False) -> float:
        """Seconds of an exchange of an all-reduce of `num_bytes` bytes. scatters: it is the reduce-scatter along the rows."""
        among = "pairs" if scatters and self.gloo else exchange.among
        share = leaving_share(among, vertical, horizontal, devices_per_host=self.devices_per_host)
        own = exchange.volume * num_bytes / self.device_bandwidth
        between = share * exchange.volume * num_bytes / self.bandwidth
        moving = own + between if self.gloo and among != "server" else max(own, between)
        return exchange.rounds * self.hops * self.latency + moving


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


# A link of a TPU. Latency: "typically around 1us" (jax-ml.github.io/scaling-book/sharding).
ICI = {name: Links(1e-6, chip.link_bandwidth, tpu=name) for name, chip in TPU_TARGETS.items()}


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
    """The network of a TPU in `ICI`, "latency,bandwidth" or "latency,bandwidth,device bandwidth". Raises ConfigError."""
    if text in ICI:
        return ICI[text]
    try:
        latency, *bandwidths = (float(part) for part in text.split(","))
    except ValueError:
        latency, bandwidths = math.nan, []
    if not (0 <= latency < math.inf and len(bandwidths) in (1, 2) and all(0 < one < math.inf for one in bandwidths)):
        raise ConfigError(
            "--network",
            text,
            reason="must be LATENCY,BANDWIDTH or LATENCY,BANDWIDTH,DEVICE: seconds (0 or more) and bytes per second (positive)",
            hint=f"for example 5e-6,10e9, or the TPU {', '.join(ICI)}",
        )
    return Links(latency, bandwidths[0], device_bandwidth=bandwidths[1] if len(bandwidths) > 1 else math.inf)


def _seconds(strategy: str, mesh: tuple[int, int], messages: list[int], *, network: Links) -> float:
    """Seconds of all-reduces, one after another. messages: bytes of each."""
    return sum(allreduce_seconds(strategy, *mesh, num_bytes=size, network=network) for size in messages)


def _sharded_seconds(strategy: str, mesh: tuple[int, int], model_summary: dict, *, network: Links) -> float:
    """Seconds of all messages of a step with a sharded update, one after another."""
    gradients, statistics = _gradients_and_statistics(model_summary)
    sizes = [(size, 0) for size in gradients] + [(0, size) for size in model_summary["gathered_messages"]]
    seconds = [
        sharded_update_seconds(strategy, *mesh, gradient_bytes=gradient, parameter_bytes=parameters, network=network)
        for gradient, parameters in sizes
    ]
    norms = [network.seconds(ring_exchange("row", mesh[1]), *mesh, num_bytes=size) for size in model_summary["norms_messages"]]
    return sum(seconds) + sum(norms) + _seconds(strategy, mesh, statistics, network=network)


def _gradients_and_statistics(model_summary: dict) -> tuple[list[int], list[int]]:
    """Bytes of each message of the two kinds."""
    messages, statistics = model_summary["messages"], model_summary["statistics_messages"]
    return messages[: -len(statistics)], statistics


SHARDED = ", sharded update"  # suffix of the strategy in a prediction


def predict(
    plan: Plan,
    model_summary: dict,
    network: Links,
    *,
    rate: float | None = None,
    normalization_messages: list[int] | None = None,
) -> dict:
    """Step time and efficiency of every phase on its devices, by strategy.

    rate: images/s of one device without communication; None for a V100 on ResNet-50 (Mikami et al.), scaled by
    multiply-adds. normalization_messages: bytes of each message of synchronized batch normalization in a micro-batch, each of
    which is a psum for every strategy.
    """
    between_layers = normalization_messages or []
    if network.gloo and plan.config.reduce.wire_dtype == "bfloat16":  # XLA converts it to float32 on CPUs
        gradients, statistics = _gradients_and_statistics(model_summary)
        model_summary = model_summary | {"messages": [2 * size for size in gradients] + statistics}
    rate = rate or V100_IMAGES_PER_SECOND * RESNET50_MACS / model_summary["macs"]
    messages = model_summary["messages"]
    return {
        "latency": network.latency,
        "bandwidth": network.bandwidth,
        "device_bandwidth": None if network.device_bandwidth == math.inf else network.device_bandwidth,
        "devices_per_host": network.devices_per_host,
        "gloo": network.gloo,
        "tpu": network.tpu,
        "hops": network.hops,
        "message_bytes": sum(messages),
        "messages": messages,
        "normalization_messages": between_layers,
        "device_images_per_second": rate,
        "phases": [
            _predict_phase(plan, phase, model_summary, network=network, rate=rate, between_layers=between_layers)
            for phase in plan.phases
        ],
    }


def _predict_phase(
    plan: Plan, phase: PlannedPhase, model_summary: dict, *, network: Links, rate: float, between_layers: list[int]
) -> dict:
    share = network.devices_per_host * phase.devices // (phase.devices + phase.idle_devices)  # equal on all hosts
    used, one_device = network._replace(devices_per_host=max(1, share)), phase.global_batch / rate

    def normalization_seconds(devices: int, shape: tuple[int, int], network: Links) -> float:
        return max(1, phase.workers // devices) * _seconds("psum", shape, between_layers, network=network)

    forms = [(name, False) for name, strategy in STRATEGIES.items() if strategy.cost]
    if plan.config.reduce.update == "sharded":
        forms += [(name, True) for name, strategy in STRATEGIES.items() if strategy.cost and strategy.scatters]
    strategies = {}
    for name, sharded in forms:
        if unsupported_reason(name, phase.devices):
            continue

        def communication(devices: int, *, name: str = name, sharded: bool = sharded) -> float:
            shape, links = (phase.shape, used) if devices == phase.devices else (_shape(devices, network), network)
            normalization = normalization_seconds(devices, shape, links)
            if sharded:
                return _sharded_seconds(name, shape, model_summary, network=links) + normalization
            return _seconds(name, shape, model_summary["messages"], network=links) + normalization

        seconds = communication(phase.devices)
        total = step_seconds(one_device, phase.devices, seconds)
        counts = [n for n in DEVICE_COUNTS if n <= phase.global_batch and not unsupported_reason(name, n)]
        diminishing, fastest = turning_points(one_device, communication, counts)
        strategies[name + SHARDED * sharded] = {
            "communication_seconds": seconds,
            "step_seconds": total,
            "efficiency": one_device / phase.devices / total,
            "images_per_second": phase.global_batch / total,
            "diminishing_from": diminishing,
            "fastest_at": fastest,
            "most_devices": counts[-1],
        }
    return {
        "index": phase.index,
        "devices": phase.devices,
        "mesh": list(phase.shape),
        "global_batch": phase.global_batch,
        "computation_seconds": one_device / phase.devices,
        "normalization_seconds": normalization_seconds(phase.devices, phase.shape, used),
        "strategies": strategies,
    }


def _shape(devices: int, network: Links) -> tuple[int, int]:
    """The default mesh of this number of devices."""
    if network.devices_per_host == 1:
        return default_shape(devices)
    return choose_shape(Mesh(), devices, max(1, devices // network.devices_per_host))


def tables(prediction: dict) -> Iterator["Table"]:
    """A rich table per phase."""
    from jaxdp.analysis.tables import table_of

    between_layers = prediction["normalization_messages"]
    network = f"{1e6 * prediction['latency']:g} us and {prediction['bandwidth'] / 1e9:g} GB/s"
    if prediction["devices_per_host"] > 1:
        network += f" for the {prediction['devices_per_host']} devices of a host"
    for phase in prediction["phases"]:
        title = (
            f"phase {phase['index']} on a network of {network}: {plural(phase['devices'], 'device')} "
            f"({phase['mesh'][0]}x{phase['mesh'][1]}), {prediction['message_bytes']:,} bytes in "
            f"{len(prediction['messages'])} messages, {1e3 * phase['computation_seconds']:.2f} ms of computation per step"
        )
        if between_layers:
            title += (
                f"; batch normalization: {sum(between_layers):,} bytes in {len(between_layers)} messages of a "
                f"micro-batch, {1e3 * phase['normalization_seconds']:.2f} ms of each all-reduce time below"
            )
        rows = [_cells(strategy, row) for strategy, row in phase["strategies"].items()]
        yield table_of(title, COLUMNS, rows, left=("strategy",))


def _cells(strategy: str, row: dict) -> tuple[str, ...]:
    """The texts of a row, by `COLUMNS`."""
    counts = (row["diminishing_from"], row["fastest_at"])
    return (
        strategy,
        f"{1e3 * row['communication_seconds']:.3f} ms",
        f"{1e3 * row['step_seconds']:.3f} ms",
        f"{100 * row['efficiency']:.1f} %",
        f"{row['images_per_second']:,.0f}",
        *(f"{row['most_devices']:,} or more" if count is None else f"{count:,}" for count in counts),
    )


def notes(prediction: dict) -> list[str]:
    """The assumptions of a prediction, as paragraphs."""
    normalization = (
        "Synchronized batch normalization sends messages between the layers, forward and backward, as psum for every strategy. "
        "The next layer waits for them, so they cannot be hidden."
    )
    links, tpu, hops = "each device has one full-duplex link", prediction["tpu"], plural(prediction["hops"], "hop")
    if prediction["devices_per_host"] > 1:
        links = f"the {prediction['devices_per_host']} devices of a host share one full-duplex link"
    if prediction["device_bandwidth"] is not None:
        links += f", and a device sends at most {prediction['device_bandwidth'] / 1e9:g} GB/s"
    return [
        f"Assumptions: a device computes {prediction['device_images_per_second']:.0f} images/s (--images-per-second); no "
        f"communication is hidden; {links}; messages are sent one after another, as the step sends "
        "them (--reduce.bucket-bytes). The last two columns are numbers of devices, powers of two, that share the batch of the "
        "phase.",
        *(["gloo sends bfloat16 as float32."] if prediction["gloo"] else []),
        *([f"A link of TPU {tpu}, one way, as published; not measured. A round takes {hops}."] if tpu else []),
        *([normalization] if prediction["normalization_messages"] else []),
    ]
