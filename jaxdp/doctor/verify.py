"""`jaxdp doctor --verify`: what the README claims of the training step and of resuming, proved on the devices that are here."""

import dataclasses
import json
import math
import time
from collections.abc import Iterator

from jaxdp.bench import scaling
from jaxdp.bench.provenance import VIRTUAL, provenance
from jaxdp.config import Config, Data, Mesh, Model, Phase
from jaxdp.doctor import gradients, resuming
from jaxdp.doctor.proof import Proof
from jaxdp.errors import first_line
from jaxdp.models.resnet import TWO_BLOCKS
from jaxdp.parallel import distributed

CPU_DEVICES = 4  # where there is no accelerator and no other number is asked for
IMAGES, REPEATS = 8, 5  # a device and step, timed steps, for scaling
COLOURS = {"passed": "green", "FAILED": "red", "measured": ""}


def run(config: Config, progress=lambda text: None) -> dict:
    """The record of all proofs, on all devices of this process; of a CPU on `mesh.cpu_devices`, or 4.

    config: of its fields mesh.cpu_devices and compile are taken. Raises ConfigError where the devices do not start.
    """
    began = time.perf_counter()
    cpu_devices = max(config.mesh.cpu_devices or CPU_DEVICES, 2)
    compile = dataclasses.replace(config.compile, deterministic=True)
    devices = distributed.start(Mesh(cpu_devices=cpu_devices), compile=compile)
    if devices[0].platform != "cpu":
        cpu_devices = None
    found = list(_all(devices, cpu_devices, compile, progress))
    return {
        "provenance": provenance(),
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "virtual": devices[0].platform == "cpu",
        "seconds": time.perf_counter() - began,
        "failed": [one.proof for one in found if one.passed is False],
        "proofs": [one.as_dict() | {"verdict": one.verdict} for one in found],
    }


def _all(devices, cpu_devices, compile, progress) -> Iterator[Proof]:
    yield from gradients.proofs(devices, compile, progress)
    progress("a run that is stopped and goes on, beside one that is not ...")
    yield resuming.proof(len(devices), cpu_devices, compile)
    yield from _scaling(len(devices), compile, progress)


def _scaling(devices: int, compile, progress) -> Iterator[Proof]:
    """The step of a small net on 1, 2, 4, ... and all devices with as many images on each: measured, nothing is asked of it."""
    counts = scaling.ladder(devices)
    config = Config(
        data=Data(source="synthetic", image_size=32),
        model=Model(depth=TWO_BLOCKS, width=16, stem="small", classes=10),
        batch=(Phase(global_batch=IMAGES * counts[-1]),),
        compile=compile,
    )
    began = time.perf_counter()
    try:
        rows = scaling.run(config, counts, REPEATS, progress, modes=("weak",))["rows"]
    except Exception as error:  # of a compiler or a driver
        reason = f"{type(error).__name__}: {first_line(error)}"
        yield Proof("scaling", f"{counts} devices", None, None, False, time.perf_counter() - began, reason)
        return
    seconds = (time.perf_counter() - began) / len(rows)
    for row in rows:
        whole, exposed = row["step_seconds"], row["exposed_communication_seconds"]
        told = f"{1e3 * whole:.1f} ms a step of {row['global_batch']} images, efficiency {100 * row['efficiency']:.0f} %"
        told += f", communication {100 * exposed / whole:.0f} %" if row["devices"] > 1 else ""
        yield Proof(f"scaling: {row['devices']} of {devices}", told, None, None, None, seconds)


def shown(record: dict):
    """A rich table with a line for each group of proofs, the failed ones by themselves, and what the whole is worth."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("proof, and what was compared", overflow="fold")
    for name in ("difference", "allowed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    for name, rows in _grouped(record["proofs"]).items():
        apart = [row["difference"] for row in rows if row["difference"] is not None]
        allowed, verdict = rows[0]["allowed"], rows[0]["verdict"]
        table.add_row(
            "\n  ".join([name, rows[0]["compared"], *([rows[0]["reason"]] if rows[0]["reason"] else [])]),
            f"{max(apart):.1e}" if apart and max(apart) else "0" if apart else "",
            "" if allowed is None else f"{allowed:g}",
            Text(verdict, COLOURS[verdict]),
            f"{sum(row['seconds'] for row in rows):.1f}",
        )
    yield table
    if record["virtual"]:
        yield VIRTUAL
    yield summary(record)


def _grouped(rows: list[dict]) -> dict[str, list[dict]]:
    """Lines of the table: what passed of one strategy on all meshes together, everything else by itself."""
    groups = {}
    for row in rows:
        what, on, where = row["proof"].partition(" on ")
        together = on and row["passed"]
        groups.setdefault((what if together else row["proof"], row["passed"]), []).append((where, row))
    return {
        name + (f" on {', '.join(where for where, _ in pairs)}" if pairs[0][0] and passed else ""): [row for _, row in pairs]
        for (name, passed), pairs in groups.items()
    }


def summary(record: dict) -> str:
    count = sum(row["passed"] is not None for row in record["proofs"])
    what = f"{count} proofs on {record['device']} in {record['seconds']:.0f} s"
    if failed := record["failed"]:
        return f"{what}; FAILED: {', '.join(failed)}"
    return f"{what}; all passed"


def to_json(record: dict) -> str:
    """The record as JSON, with null for a difference that is infinite or no number."""
    finite = {row["proof"]: row["difference"] for row in record["proofs"] if math.isfinite(row["difference"] or 0.0)}
    rows = [row | {"difference": finite.get(row["proof"])} for row in record["proofs"]]
    return json.dumps(record | {"proofs": rows}, indent=1, allow_nan=False)
