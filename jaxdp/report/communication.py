"""Exposed communication of a finished run: its training step is timed with and without reductions."""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdp.config import Config, at_image_size
from jaxdp.errors import ConfigError, plural
from jaxdp.files import write_atomically
from jaxdp.report.run_history import COMMUNICATION, History
from jaxdp.validation import to_json
from jaxdp.xla.jax_options import own_options

if TYPE_CHECKING:
    import jax

    from jaxdp.planning import Plan, PlannedPhase

REPEATS = 7


@own_options()
def measure_communication(run: History, repeats: int = REPEATS, info: Callable[[str], None] = lambda text: None) -> Path | None:
    """Time the step of every phase of a finished run with and without reductions; return the file with the result.

    Needs idle devices of the kind and number that the run had; uses synthetic images. None for a run on one device. Raises
    ConfigError if the run is not finished or has several processes, or if the devices differ.
    """
    if run.status != "finished":
        raise _refused(run, "is not finished")
    if run.result["devices"] == 1:
        return None
    if run.result["processes"] > 1:
        hint = "leave --communication out, and run jaxdp bench scaling in as many processes"
        raise _refused(run, f"has {plural(run.result['processes'], 'process')}", hint)
    from jaxdp import models
    from jaxdp.bench.environment import provenance
    from jaxdp.setup.tuning import chosen_reductions

    plan, devices = _plan_on_same_devices(run)
    reductions = chosen_reductions(plan, models.create(run.config.model), run.path, info=lambda text: None)
    rows = []
    for phase in plan.phases:
        info(
            f"{run.label}, phase {phase.index}: the step on {phase.vertical}x{phase.horizontal} with and without reductions ..."
        )
        config = replace(run.config, reduce=reductions.get(phase.shape, run.config.reduce))
        rows.append(_time_phase(config, phase, devices=devices, repeats=repeats))
    record = {"provenance": provenance(), "repeats": repeats, "config": json.loads(to_json(run.config)), "phases": rows}
    path = run.path / COMMUNICATION
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    return path


def _refused(run: History, reason: str, hint: str = "leave --communication out") -> ConfigError:
    return ConfigError("--communication", reason=f"the run {run.files.workdir!r} {reason}", hint=hint)


def _plan_on_same_devices(run: History) -> tuple["Plan", list["jax.Device"]]:
    """(plan, devices) of the run on this machine. Raises ConfigError if devices or mesh differ from those of the run."""
    from jaxdp.distributed import runtime
    from jaxdp.planning import make_plan

    devices = runtime.start(run.config.mesh, compile=run.config.compile)
    plan = make_plan(run.config, examples=round(run.result["samples"] / run.result["epochs"]), devices=len(devices))
    phase = plan.phases[-1]
    then = f"{run.result['devices']} x {run.result['device_kind']}, mesh {'x'.join(map(str, run.result['mesh']))}"
    now = f"{phase.devices} x {devices[0].device_kind}, mesh {phase.vertical}x{phase.horizontal}"
    if then != now:
        raise _refused(run, f"had {then}, but this machine has {now}", "measure on the machine of the run")
    return plan, devices


def _time_phase(config: Config, phase: "PlannedPhase", *, devices: list["jax.Device"], repeats: int) -> dict:
    from jaxdp.bench.step_runner import build_with_and_without
    from jaxdp.parallel import timing
    from jaxdp.training.step_compiler import mesh_of

    only = replace(config.batch[phase.index], global_batch=phase.global_batch, per_worker_batch=phase.per_worker_batch)
    config = at_image_size(replace(config, batch=(only,)), phase.image_size)
    strategy = config.reduce.strategy
    calls = build_with_and_without(config, mesh_of(phase, devices), global_batch=phase.global_batch, strategy=strategy)
    seconds = {name: statistics.median(times) for name, times in timing.time_alternately(calls, repeats).items()}
    return {
        "phase": phase.index,
        "steps": phase.steps,
        "global_batch": phase.global_batch,
        "mesh": list(phase.shape),
        "strategy": strategy,
        "step_seconds": seconds["with"],
        "without_reduction_seconds": seconds["without"],
    }
