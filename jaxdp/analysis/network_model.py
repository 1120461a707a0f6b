"""Prediction of step time and efficiency of a plan on a network of given latency and bandwidth, for every strategy."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxdp.analysis import cost_model
from jaxdp.analysis.cost_model import Links
from jaxdp.config import Mesh
from jaxdp.errors import plural
from jaxdp.parallel.mesh import choose_shape, default_shape
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.strategies import STRATEGIES, ring_exchange, unsupported_reason

if TYPE_CHECKING:
    from rich.table import Table

RESNET50_MACS = 4_089_184_256  # multiply-adds of an image of 224 pixels
MAX_DEVICES = 16_384
COLUMNS = ("strategy", "all-reduce", "step", "efficiency", "images/s", "diminishing returns from", "fastest at")
DEVICE_COUNTS = [2**power for power in range(MAX_DEVICES.bit_length())]


def _seconds(strategy: str, mesh: tuple[int, int], messages: list[int], *, network: Links) -> float:
    """Seconds of all-reduces, one after another. messages: bytes of each."""
    return sum(cost_model.allreduce_seconds(strategy, *mesh, num_bytes=size, network=network) for size in messages)


def _sharded_seconds(strategy: str, mesh: tuple[int, int], model_summary: dict, *, network: Links) -> float:
    """Seconds of all messages of a step with a sharded update, one after another."""
    gradients, statistics = _gradients_and_statistics(model_summary)
    sizes = [(size, 0) for size in gradients] + [(0, size) for size in model_summary["gathered_messages"]]
    seconds = [
        cost_model.sharded_update_seconds(strategy, *mesh, gradient_bytes=gradient, parameter_bytes=parameters, network=network)
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
    rate = rate or cost_model.V100_IMAGES_PER_SECOND * RESNET50_MACS / model_summary["macs"]
    messages = model_summary["messages"]
    return {
        "latency": network.latency,
        "bandwidth": network.bandwidth,
        "device_bandwidth": None if network.device_bandwidth == math.inf else network.device_bandwidth,
        "devices_per_host": network.devices_per_host,
        "gloo": network.gloo,
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
        total = cost_model.step_seconds(one_device, phase.devices, seconds)
        counts = [n for n in DEVICE_COUNTS if n <= phase.global_batch and not unsupported_reason(name, n)]
        diminishing, fastest = cost_model.turning_points(one_device, communication, counts)
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
    links = "each device has one full-duplex link"
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
        *([normalization] if prediction["normalization_messages"] else []),
    ]
