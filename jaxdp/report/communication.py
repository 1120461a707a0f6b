"""Exposed communication of a finished run, measured apart: its step with the reductions, beside the same step without them."""

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
    from jaxdp import models
    from jaxdp.bench.provenance import provenance
    from jaxdp.training.console import Quiet
    from jaxdp.training.strategy import chosen_strategies

    plan, devices = _planned(run, refused)
    strategies = chosen_strategies(plan, models.create(run.config.model), run.path, Quiet())
    rows = []
    for phase in plan.phases:
        strategy = strategies.get(phase.shape, run.config.reduce.strategy)
        rows.append(_phase(run, phase, devices, strategy, repeats, say))
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


def _phase(run: History, phase, devices, strategy: str, repeats: int, say) -> dict:
    from jaxdp.bench.stepper import with_and_without
    from jaxdp.parallel import measure
    from jaxdp.training.programs import mesh_of

    row = {"phase": phase.index, "steps": phase.steps, "global_batch": phase.global_batch, "mesh": list(phase.shape)}
    row |= {"strategy": strategy}
    say(f"{run.label}, phase {phase.index}: the step on {phase.vertical}x{phase.horizontal} with and without reductions ...")
    calls = with_and_without(_config_of(run.config, phase), mesh_of(phase, devices), phase.global_batch, strategy)
    seconds = {name: statistics.median(took) for name, took in measure.alternated(calls, repeats).items()}
    return row | {"step_seconds": seconds["with"], "without_reduction_seconds": seconds["without"]}


def _config_of(config: Config, phase) -> Config:
    """The config with this phase alone, divided among workers as planned."""
    only = replace(config.batch[phase.index], global_batch=phase.global_batch, per_worker_batch=phase.per_worker_batch)
    return replace(config, batch=(only,))
