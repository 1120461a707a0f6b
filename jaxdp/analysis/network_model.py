"""Prediction of step time and efficiency of a plan on a network of given latency and bandwidth, for every strategy."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxdp.analysis import cost_model
from jaxdp.errors import plural
from jaxdp.parallel.mesh import default_shape
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.strategies import STRATEGIES, unsupported_reason

if TYPE_CHECKING:
    from rich.table import Table

RESNET50_MACS = 4_089_184_256  # multiply-adds of an image of 224 pixels
MAX_DEVICES = 16_384
COLUMNS = ("strategy", "all-reduce", "step", "efficiency", "images/s", "diminishing returns from", "fastest at")
DEVICE_COUNTS = [2**power for power in range(MAX_DEVICES.bit_length())]


class Network(NamedTuple):
    """latency: seconds per round. bandwidth: bytes per second of a device's link."""

    latency: float
    bandwidth: float

    def seconds(self, strategy: str, mesh: tuple[int, int], messages: list[int]) -> float:
        """Seconds of all messages, one after another. messages: bytes of each."""
        return sum(
            cost_model.allreduce_seconds(strategy, *mesh, num_bytes=size, latency=self.latency, bandwidth=self.bandwidth)
            for size in messages
        )

    def sharded_seconds(self, strategy: str, mesh: tuple[int, int], model_summary: dict) -> float:
        """Seconds of all messages of a step with a sharded update, one after another."""
        *gradients, statistics = model_summary["messages"]
        link: dict[str, Any] = {"latency": self.latency, "bandwidth": self.bandwidth}
        sizes = [(size, 0) for size in gradients] + [(0, size) for size in model_summary["gathered_messages"]]
        seconds = [
            cost_model.sharded_update_seconds(strategy, *mesh, gradient_bytes=gradient, parameter_bytes=parameters, **link)
            for gradient, parameters in sizes
        ]
        norms = [
            cost_model.allreduce_seconds("ring", 1, mesh[1], num_bytes=size, **link) for size in model_summary["norms_messages"]
        ]
        return sum(seconds) + sum(norms) + self.seconds(strategy, mesh, [statistics])


SHARDED = ", sharded update"  # suffix of the strategy in a prediction


def predict(
    plan: Plan,
    model_summary: dict,
    network: Network,
    *,
    rate: float | None = None,
    normalization_messages: list[int] | None = None,
) -> dict:
    """Step time and efficiency of every phase with one device per worker, by strategy.

    rate: images/s of one device without communication; None for that of a V100 on ResNet-50 (Mikami et al.), scaled by
    multiply-adds. normalization_messages: bytes of each message of synchronized batch normalization in a step, which is a psum
    for every strategy.
    """
    between_layers = normalization_messages or []
    rate = rate or cost_model.V100_IMAGES_PER_SECOND * RESNET50_MACS / model_summary["macs"]
    messages = model_summary["messages"]
    return {
        "latency": network.latency,
        "bandwidth": network.bandwidth,
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
    plan: Plan, phase: PlannedPhase, model_summary: dict, *, network: Network, rate: float, between_layers: list[int]
) -> dict:
    mesh = phase.shape if phase.accumulation == 1 else default_shape(phase.workers)  # with one device per worker
    one_device = phase.workers * phase.per_worker_batch / rate
    forms = [(name, False) for name, strategy in STRATEGIES.items() if strategy.cost]
    if plan.config.reduce.update == "sharded":
        forms += [(name, True) for name, strategy in STRATEGIES.items() if strategy.gather_cost]
    strategies = {}
    for name, sharded in forms:
        if unsupported_reason(name, phase.workers):
            continue

        def communication(devices: int, *, name: str = name, sharded: bool = sharded) -> float:
            shape = mesh if devices == phase.workers else default_shape(devices)
            normalization = network.seconds("psum", shape, between_layers)
            if sharded:
                return network.sharded_seconds(name, shape, model_summary) + normalization
            return network.seconds(name, shape, model_summary["messages"]) + normalization

        seconds = communication(phase.workers)
        total = cost_model.step_seconds(one_device, phase.workers, seconds)
        counts = [n for n in DEVICE_COUNTS if n <= phase.global_batch and not unsupported_reason(name, n)]
        diminishing, fastest = cost_model.turning_points(one_device, communication, counts)
        strategies[name + SHARDED * sharded] = {
            "communication_seconds": seconds,
            "step_seconds": total,
            "efficiency": one_device / phase.workers / total,
            "images_per_second": phase.global_batch / total,
            "diminishing_from": diminishing,
            "fastest_at": fastest,
            "most_devices": counts[-1],
        }
    return {
        "index": phase.index,
        "workers": phase.workers,
        "mesh": list(mesh),
        "global_batch": phase.global_batch,
        "computation_seconds": one_device / phase.workers,
        "normalization_seconds": network.seconds("psum", mesh, between_layers),
        "strategies": strategies,
    }


def tables(prediction: dict) -> Iterator["Table"]:
    """A rich table per phase."""
    from jaxdp.analysis.tables import table_of

    between_layers = prediction["normalization_messages"]
    network = f"{1e6 * prediction['latency']:g} us and {prediction['bandwidth'] / 1e9:g} GB/s"
    for phase in prediction["phases"]:
        title = (
            f"phase {phase['index']} on a network of {network}: {plural(phase['workers'], 'worker')} "
            f"({phase['mesh'][0]}x{phase['mesh'][1]}), {prediction['message_bytes']:,} bytes in "
            f"{len(prediction['messages'])} messages, {1e3 * phase['computation_seconds']:.2f} ms of computation per step"
        )
        if between_layers:
            title += (
                f"; batch normalization: {sum(between_layers):,} bytes in {len(between_layers)} messages, "
                f"{1e3 * phase['normalization_seconds']:.2f} ms of each all-reduce time below"
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
    return [
        f"Assumptions: a device computes {prediction['device_images_per_second']:.0f} images/s (--images-per-second); no "
        "communication is hidden; each device has one full-duplex link; messages are sent one after another, as the step sends "
        "them (--reduce.bucket-bytes). The last two columns are numbers of devices, powers of two, that share the batch of the "
        "phase.",
        *([normalization] if prediction["normalization_messages"] else []),
    ]
