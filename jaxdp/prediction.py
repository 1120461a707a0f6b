"""What a network makes of a plan: step time and efficiency by strategy, from the latency-bandwidth model."""

from jaxdp.parallel import cost_model
from jaxdp.parallel.mesh import most_square, unfit
from jaxdp.planning import Plan, PlannedPhase

RESNET50_MACS = 4_089_184_256  # of the model that Table 6 timed, at 224 pixels
MOST_DEVICES = 16_384
COLUMNS = ("strategy", "all-reduce", "in one message", "step", "efficiency", "images/s")
COLUMNS += ("a doubling pays to", "shortest step at")
POWERS = [2**power for power in range(MOST_DEVICES.bit_length())]


def images_per_second(model_summary: dict) -> float:
    """Images/s of a device that nothing holds up: the paper's V100 on ResNet-50, scaled by the model's multiply-adds."""
    return cost_model.TABLE_6_IMAGES_PER_SECOND * RESNET50_MACS / model_summary["macs"]


def _seconds(strategy: str, mesh: tuple[int, int], messages: list[int], latency: float, bandwidth: float) -> float:
    """Of all messages of a step, one after the other."""
    return sum(cost_model.allreduce_seconds(strategy, *mesh, size, latency, bandwidth) for size in messages)


def mesh_of_workers(phase: PlannedPhase) -> tuple[int, int]:
    """The phase's own mesh where every device is a worker, else the most square one with a device for each worker."""
    return (phase.vertical, phase.horizontal) if phase.accumulation == 1 else most_square(phase.workers)


def predict(plan: Plan, model_summary: dict, latency: float, bandwidth: float, rate: float | None = None) -> dict:
    """Step time and efficiency of every phase with one device for each of its workers, by strategy.

    latency: seconds; bandwidth: bytes a second; rate: images/s that a device computes alone, None for `images_per_second`.
    """
    rate = rate or images_per_second(model_summary)
    messages = model_summary["messages"]
    phases = []
    for phase in plan.phases:
        mesh = mesh_of_workers(phase)
        computation = phase.per_worker_batch / rate
        strategies = {}
        for strategy in cost_model.STRATEGIES:
            if unfit(strategy, phase.workers):
                continue

            def communication(devices, strategy=strategy, phase=phase, mesh=mesh):
                shape = mesh if devices == phase.workers else most_square(devices)
                return _seconds(strategy, shape, messages, latency, bandwidth)

            seconds = communication(phase.workers)
            total = cost_model.step_seconds(computation * phase.workers, phase.workers, seconds)
            counts = [n for n in POWERS if n <= phase.global_batch and not unfit(strategy, n)]
            diminishing, fastest = cost_model.turning_points(computation * phase.workers, communication, counts)
            strategies[strategy] = {
                "communication_seconds": seconds,
                "one_message_seconds": _seconds(strategy, mesh, [sum(messages)], latency, bandwidth),
                "step_seconds": total,
                "efficiency": computation / total,
                "images_per_second": phase.global_batch / total,
                "diminishing_from": diminishing,
                "fastest_at": fastest,
                "most_devices": counts[-1],
            }
        phases.append(
            {
                "index": phase.index,
                "workers": phase.workers,
                "mesh": list(mesh),
                "global_batch": phase.global_batch,
                "computation_seconds": computation,
                "strategies": strategies,
            }
        )
    return {
        "latency": latency,
        "bandwidth": bandwidth,
        "message_bytes": sum(messages),
        "messages": messages,
        "device_images_per_second": rate,
        "phases": phases,
        "table_6": {strategy: cost_model.fit_table_6(strategy) for strategy in ("torus", "ring")},
        "table_6_caution": cost_model.TABLE_6_CAUTION,
    }


def tables(told: dict):
    """A rich table for each phase, then the lines that say what the figures rest on."""
    from rich.table import Table

    for phase in told["phases"]:
        shown = Table(box=None, padding=(0, 2, 0, 0))
        shown.title = (
            f"phase {phase['index']} on a network of {1e6 * told['latency']:g} us and {told['bandwidth'] / 1e9:g} GB/s: "
            f"{phase['workers']} workers ({phase['mesh'][0]}x{phase['mesh'][1]}), {told['message_bytes']:,} bytes in "
            f"{len(told['messages'])} messages, {1e3 * phase['computation_seconds']:.2f} ms of computation a step"
        )
        for name in COLUMNS:
            shown.add_column(name, justify="left" if name == "strategy" else "right")
        for strategy, one in phase["strategies"].items():
            shown.add_row(
                strategy,
                f"{1e3 * one['communication_seconds']:.3f} ms",
                f"{1e3 * one['one_message_seconds']:.3f} ms",
                f"{1e3 * one['step_seconds']:.3f} ms",
                f"{100 * one['efficiency']:.1f} %",
                f"{one['images_per_second']:,.0f}",
                *(
                    f"{one['most_devices']:,} or more" if one[name] is None else f"{one[name]:,}"
                    for name in ("diminishing_from", "fastest_at")
                ),
            )
        yield shown


def remarks(told: dict) -> list[str]:
    fits = "; ".join(
        f"{name} {1e6 * fit['latency']:.3g} us a round, errors {', '.join(f'{100 * e:+.1f} %' for e in fit['errors'])}"
        for name, fit in told["table_6"].items()
    )
    return [
        f"A device is taken to compute {told['device_images_per_second']:.0f} images/s (--images-per-second), and none of the "
        "communication to be hidden. Messages travel one after the other as the step sends them (--reduce.bucket-bytes); XLA "
        "may combine them, down to the one of the third column. The last two columns count devices that share the phase's "
        "batch, in powers of two, as far as it has images for them.",
        f"The model on the paper's Table 6: {fits}. {told['table_6_caution']}",
    ]


def draw(told: dict, path) -> None:
    """Efficiency against devices, up to 16,384: with the batch of a worker fixed (left), and the global batch fixed (right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    weak, strong = figure.subplots(1, 2)
    phase = told["phases"][-1]
    counts = POWERS
    styles = {"psum": ("#000000", "-"), "ring": ("#D55E00", "--"), "hierarchical": ("#E69F00", "-.")}
    styles |= {"torus": ("#0072B2", "-"), "parameter_server": ("#CC79A7", ":")}
    for strategy, (colour, line) in styles.items():
        costs = {
            n: _seconds(strategy, most_square(n), told["messages"], told["latency"], told["bandwidth"])
            for n in counts
            if not unfit(strategy, n)
        }
        one = phase["computation_seconds"]
        weak.plot(list(costs), [one / (one + cost) for cost in costs.values()], color=colour, linestyle=line, label=strategy)
        whole = one * phase["workers"]
        shared = [n for n in costs if n <= phase["global_batch"]]
        efficiency = [cost_model.speed_up(whole, n, costs[n]) / n for n in shared]
        strong.plot(shared, efficiency, color=colour, linestyle=line, label=strategy)
    weak.set_title(f"{phase['global_batch'] // phase['workers']} images a device", fontsize="medium")
    strong.set_title(f"{phase['global_batch']:,} images a step in all", fontsize="medium")
    for axes in (weak, strong):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts[::2], [f"{n:,}" for n in counts[::2]], fontsize="small")
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("devices")
        axes.grid(alpha=0.3)
    weak.set_ylabel("efficiency")
    weak.legend(fontsize="small", frameon=False)
    figure.suptitle(
        f"Predicted: {told['message_bytes'] / 1e6:.1f} MB in {len(told['messages'])} messages, {1e6 * told['latency']:g} us, "
        f"{told['bandwidth'] / 1e9:g} GB/s, {told['device_images_per_second']:.0f} images/s a device, nothing hidden",
        fontsize="medium",
    )
    figure.savefig(path, format="png", dpi=120)
