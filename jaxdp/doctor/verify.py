"""`jaxdp doctor --verify`: proofs of the training step, of reductions and of resuming on the devices of this machine."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.table import Table
from rich.text import Text

from jaxdp.bench import scaling
from jaxdp.bench.environment import VIRTUAL_NOTE, provenance
from jaxdp.config import Compile, Config, Data, Mesh, Phase
from jaxdp.distributed import runtime
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.doctor import verify_gradients, verify_resume, verify_sums
from jaxdp.doctor.proof import Proof
from jaxdp.errors import first_line
from jaxdp.xla.jax_options import own_options

CPU_DEVICES = 4  # virtual devices of a CPU, unless --mesh.cpu-devices is given
SCALING_IMAGES, SCALING_REPEATS = 8, 5  # images per device and step, timed steps
COLORS = {"passed": "green", "FAILED": "red", "measured": ""}


@own_options()
def run(
    config: Config,
    info: Callable[[str], None] = lambda text: None,
    *,
    group: ProcessGroup | None = None,
    shared_dir: Path | None = None,
    thorough: bool = False,
) -> dict:
    """Run the proofs on all devices of all processes and return their record, which `to_json` writes.

    thorough: gradients on every mesh, not only on that of `config`, and the times of the step on growing numbers of devices.
    An interrupt ends the proofs: "stopped" of the record is then true, and "proofs" are those that have ended.
    A CPU is split into `mesh.cpu_devices`, by default 4 divided by the number of processes. Model, mesh and wire dtype of
    `config` determine the messages; the runs of the proof of exact resume use its optimizer. info: receives progress lines.
    group: the processes, all of which call this. shared_dir: a directory on a file system that all processes share. Raises
    ConfigError if the devices do not start.
    """
    start, group = time.perf_counter(), group or ProcessGroup()
    cpu_devices = config.mesh.cpu_devices or max(1, CPU_DEVICES // group.num_processes)
    if group.num_processes == 1:
        cpu_devices = max(cpu_devices, 2)
    compile = dataclasses.replace(config.compile, deterministic=True)
    config = dataclasses.replace(config, compile=compile)
    devices = runtime.start(Mesh(cpu_devices=cpu_devices), group, compile)
    on_cpu = devices[0].platform == "cpu"

    def all_proofs() -> Iterator[Proof]:
        shape = verify_sums.mesh_shape(config, len(devices), group.num_processes)
        shapes = verify_gradients.mesh_shapes(len(devices)) if thorough else [shape]
        yield from verify_gradients.proofs(devices, compile, shapes=shapes, info=info, group=group)
        yield from verify_sums.proofs(config, devices, info=info, group=group)
        info("exact resume: an interrupted run against an uninterrupted one ...")
        yield verify_resume.proof(
            len(devices),
            cpu_devices if on_cpu else None,
            optimizer=config.optimizer,
            reduce=config.reduce,
            compile=compile,
            shared_dir=shared_dir,
            group=group,
        )
        if thorough:
            yield from _measure_scaling(len(devices), compile, info=info, group=group)

    proofs, stopped = list[Proof](), False
    try:
        for proof in all_proofs():
            proofs.append(proof)
            info(f"  {proof.name}: {proof.outcome} ({proof.seconds:.1f} s)")
    except KeyboardInterrupt:
        stopped = True
    processes = f" of {group.num_processes} processes" if group.num_processes > 1 else ""
    return {
        "provenance": provenance(),
        "device": f"{len(devices)} x {devices[0].device_kind}{processes}",
        "virtual": on_cpu,
        "seconds": time.perf_counter() - start,
        "thorough": thorough,
        "stopped": stopped,
        "failed": [proof.name for proof in proofs if proof.passed is False],
        "proofs": [proof.to_dict() for proof in proofs],
    }


def _measure_scaling(devices: int, compile: Compile, *, info: Callable[[str], None], group: ProcessGroup) -> Iterator[Proof]:
    """Time the step of a small network on 1, 2, 4, ... and all devices, with a constant number of images per device.

    With several processes, on all devices only.
    """
    counts = scaling.device_counts(devices) if group.num_processes == 1 else (devices,)
    config = Config(
        data=Data(source="synthetic", image_size=32),
        model=verify_gradients.two_block_model(width=16, classes=10),
        batch=(Phase(global_batch=SCALING_IMAGES * counts[-1]),),
        compile=compile,
    )
    start = time.perf_counter()
    try:
        measured = scaling.run(config, counts, repeats=SCALING_REPEATS, progress=info, modes=("weak",))
    except Exception as exception:  # of a compiler or a driver
        error = f"{type(exception).__name__}: {first_line(exception)}"
        yield Proof("scaling", f"{counts} devices", None, None, False, time.perf_counter() - start, error)
        return
    seconds = (time.perf_counter() - start) / len(measured["rows"])
    for row in measured["rows"]:
        text = f"{1e3 * row['step_seconds']:.1f} ms per step of {row['global_batch']} images"
        text += f", efficiency {100 * row['efficiency']:.0f} %"
        text += f", communication {scaling.exposed_words(row)}" if row["devices"] > 1 else ""
        yield Proof(f"scaling: {row['devices']} of {devices}", text, None, None, None, seconds)
    if measured["stopped"]:
        raise KeyboardInterrupt


def report(record: dict) -> Iterator[Table | str]:
    """A table with one line per group of proofs and one per failed proof, then remarks and the summary."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("proof and comparison", overflow="fold")
    for heading in ("difference", "tolerance"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    for name, rows in _group_by_strategy(record["proofs"]).items():
        first, differences = rows[0], [row["difference"] for row in rows if row["difference"] is not None]
        largest = max(differences, default=None)
        table.add_row(
            "\n  ".join([name, first["comparison"], *filter(None, [first["error"]])]),
            "" if largest is None else f"{largest:.1e}" if largest else "0",
            "" if first["tolerance"] is None else f"{first['tolerance']:g}",
            Text(first["outcome"], COLORS[first["outcome"]]),
            f"{sum(row['seconds'] for row in rows):.1f}",
        )
    yield table
    if record["virtual"]:
        yield VIRTUAL_NOTE
    yield summarize(record)


def _group_by_strategy(rows: list[dict]) -> dict[str, list[dict]]:
    """Lines of the table: the passed proofs of one strategy on all meshes share a line, every other proof has its own."""
    groups: dict[tuple, list[tuple[str, dict]]] = {}
    for row in rows:
        strategy, on, mesh = row["name"].partition(" on ")
        shared = on and row["passed"]
        groups.setdefault((strategy if shared else row["name"], row["passed"]), []).append((mesh, row))
    return {
        name + (f" on {', '.join(mesh for mesh, _ in pairs)}" if pairs[0][0] and passed else ""): [row for _, row in pairs]
        for (name, passed), pairs in groups.items()
    }


def summarize(record: dict) -> str:
    count = sum(row["passed"] is not None for row in record["proofs"])
    text = f"{count} proofs on {record['device']} in {record['seconds']:.0f} s"
    passed = "stopped; those before it passed" if record["stopped"] else "all passed"
    return f"{text}; FAILED: {', '.join(record['failed'])}" if record["failed"] else f"{text}; {passed}"


def to_json(record: dict) -> str:
    """The record as JSON, with null for differences that are infinite or NaN."""
    rows = [
        row | {"difference": row["difference"] if math.isfinite(row["difference"] or 0.0) else None} for row in record["proofs"]
    ]
    return json.dumps(record | {"proofs": rows}, indent=1, allow_nan=False)
