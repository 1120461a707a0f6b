"""Exposed communication of a finished run, measured apart: its step with the reductions, beside the same step without them."""

import dataclasses
import json
import statistics
from dataclasses import replace
from pathlib import Path

from jaxdp.config import Config, ConfigError
from jaxdp.report.history import COMMUNICATION, History
from jaxdp.training.workdir import write_atomically
from jaxdp.validation import to_json

REPEATS = 7


def measure(run: History, repeats: int = REPEATS, say=lambda text: None) -> Path | None:
    """Time the step of every phase of a finished run with its reductions and without, in turns; returns the file that tells.

    On devices like those of the run, which are to be free; images are made up. A run on one device sends nothing: None.
    Raises ConfigError where the run is not finished, is of several processes, or the devices here are others.
    """
    refused = f"--communication: {str(run.path)!r} is not allowed"
    if run.state != "finished":
        raise ConfigError(f"{refused}; the run is not finished; leave --communication out")
    if run.told["devices"] == 1:
        return None
    if run.told.get("processes", 1) > 1:
        raise ConfigError(
            f"{refused}; the run is of {run.told['processes']} processes; leave --communication out, and start "
            "jaxdp bench scaling in as many"
        )
    from jaxdp.bench.provenance import provenance

    plan, devices = _planned(run, refused)
    rows = [_phase(run, plan, phase, devices, repeats, say) for phase in plan.phases]
    told = {"provenance": provenance(), "repeats": repeats, "config": json.loads(to_json(run.config)), "phases": rows}
    path = run.path / COMMUNICATION
    write_atomically(path, json.dumps(told, indent=1) + "\n")
    return path


def _planned(run: History, refused: str):
    """(plan, devices) of the run on the devices here, which are to be like its own."""
    from jaxdp.parallel import distributed
    from jaxdp.planning import make_plan

    devices = distributed.start(replace(run.config.mesh, keep_memory=False), compile=run.config.compile)
    plan = make_plan(run.config, round(run.told["samples"] / run.told["epochs"]), len(devices))
    phase = plan.phases[-1]
    then = f"{run.told['devices']} x {run.told['device_kind']}, mesh {'x'.join(map(str, run.told['mesh']))}"
    now = f"{phase.devices} x {devices[0].device_kind}, mesh {phase.vertical}x{phase.horizontal}"
    if then != now:
        raise ConfigError(f"{refused}; the run was on {then}, and here it would be on {now}; measure it where it ran")
    return plan, devices


def _phase(run: History, plan, phase, devices, repeats: int, say) -> dict:
    from jaxdp import models
    from jaxdp.bench.stepper import stepper
    from jaxdp.parallel import allreduce, measure
    from jaxdp.training.console import Quiet
    from jaxdp.training.programs import mesh_of
    from jaxdp.training.strategy import chosen_strategies

    mesh, own = mesh_of(phase, devices), _config_of(run.config, phase)
    strategies = chosen_strategies(plan, models.create(run.config.model), run.path, Quiet())
    strategy = strategies.get(phase.shape, run.config.reduce.strategy)
    row = {"phase": phase.index, "steps": phase.steps, "global_batch": phase.global_batch, "mesh": list(phase.shape)}
    row |= {"strategy": strategy}
    say(f"{run.label}, phase {phase.index}: the step on {phase.vertical}x{phase.horizontal} with and without reductions ...")
    calls = {
        name: stepper(own, mesh, phase.global_batch, how) for name, how in (("with", strategy), ("without", allreduce.local))
    }
    seconds = {name: statistics.median(took) for name, took in measure.alternated(calls, repeats).items()}
    return row | {"step_seconds": seconds["with"], "without_reduction_seconds": seconds["without"]}


def _config_of(config: Config, phase) -> Config:
    """The config with this phase alone, divided among workers as planned."""
    only = replace(config.batch[phase.index], global_batch=phase.global_batch, per_worker_batch=phase.per_worker_batch)
    return dataclasses.replace(config, batch=(only,))
