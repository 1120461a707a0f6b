"""`jaxdp plan`: what a run will do."""

import dataclasses
import io
import json
import os
from typing import Annotated

import tyro

from jaxdp.arguments import load
from jaxdp.config import Config, ConfigError
from jaxdp.files import check_output, write_whole
from jaxdp.flags import parse
from jaxdp.validation import validate


def run(arguments, program):
    recipe = load(arguments, default="digits")

    @dataclasses.dataclass(frozen=True)
    class PlanRun:
        """Print phases, steps, hyperparameters, parameters, multiply-adds and gradient bytes of a run.

        Examples:
          jaxdp plan
          jaxdp plan --config imagenet_sony_exp2 --devices 8 --json
          jaxdp plan --config imagenet_sony_exp2 --devices 3456 --wire --network 5e-6,10e9
          jaxdp plan --config imagenet_sony_exp1 --compile-for h200 --hosts 256 --gpus-per-host 8
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        config: str = "digits"
        """a recipe's name in configs/, a .py file with config(), or a saved config.json"""
        devices: int | None = None
        """plan for this many devices; default: hosts x gpus-per-host, else those of this machine"""
        hosts: int = 1
        """hosts over which the devices are spread evenly: the rows of the mesh"""
        gpus_per_host: int | None = None
        """plan for hosts x gpus-per-host devices"""
        wire: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print what a step sends: each kind of collective with axis, dtype, bytes and count"""
        network: str | None = None
        """latency,bandwidth in seconds and bytes a second, as 5e-6,10e9: predict step time and efficiency by strategy"""
        images_per_second: float | None = None
        """images/s that one device computes alone, for --network; default: from the paper's V100, by multiply-adds"""
        picture: str | None = None
        """with --network: draw efficiency against devices, up to 16,384, into this PNG"""
        overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """write over a picture that is there"""
        compile_for: str | None = None
        """a100, h100 or h200: compile the step with XLA's GPU compiler, no GPU needed (extra cuda13)"""
        phase: int = 0
        """the phase to compile"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print the plan as one JSON document"""

    chosen = parse(PlanRun, arguments, program)
    config = validate(chosen.run)
    if chosen.compile_for is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a GPU at hand is not touched
    import jaxdp
    from jaxdp.parallel import distributed
    from jaxdp.planning import as_dict, model_summary, summary_table

    devices = _devices_of(chosen)
    plan = jaxdp.plan(config, devices, chosen.hosts)
    summary = model_summary(config)
    told, shown = as_dict(plan, summary), []
    if not chosen.json:
        given = f"{devices}, as given" if devices else distributed.describe(distributed.start(config.mesh))
        shown.append(summary_table(plan, given, summary))
    for name, section in (("wire", _wire), ("network", _network), ("compiled", _compiled)):
        part = section(chosen, config, plan, summary)
        if part is not None:
            told[name], more = part
            shown += more
    if chosen.json:
        print(json.dumps(told, indent=2))
        return
    from jaxdp.training.console import Screen

    screen = Screen()
    for number, one in enumerate(shown):
        if number:
            screen.say("")
        (screen.say if isinstance(one, str) else screen.table)(one)


def _devices_of(chosen) -> int | None:
    """The number of devices that the command line asks for, checked against the hosts; None: those of this machine."""

    for name in ("devices", "hosts", "gpus_per_host"):
        value = getattr(chosen, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is not allowed; give 1 or more")
    devices = chosen.devices
    if chosen.gpus_per_host is not None:
        if devices not in (None, chosen.hosts * chosen.gpus_per_host):
            raise ConfigError(
                f"--devices: {devices} is not allowed with --hosts {chosen.hosts} --gpus-per-host {chosen.gpus_per_host}; "
                "leave one of them out"
            )
        return chosen.hosts * chosen.gpus_per_host
    if chosen.hosts > 1 and devices is None:
        raise ConfigError(f"--hosts: {chosen.hosts} is not allowed alone; give --gpus-per-host or --devices")
    if devices is not None and devices % chosen.hosts:
        raise ConfigError(f"--hosts: {chosen.hosts} is not allowed; it must divide the {devices} devices")
    return devices


def _wire(chosen, config, plan, summary):
    """(dict, things to show) of --wire: an account for phases that send the same."""
    if not chosen.wire:
        return None
    from jaxdp.parallel import wire
    from jaxdp.training.programs import wire_accounts

    if config.reduce.strategy == "auto":
        raise ConfigError("reduce.strategy: 'auto' is not allowed with --wire; it is chosen by measuring; give one by name")
    accounts = wire_accounts(plan)
    return [wire.as_dict(one) for one in accounts], [wire.table(one) for one in accounts]


def _network(chosen, config, plan, summary):
    if chosen.network is None:
        for name in ("picture", "images_per_second"):
            if getattr(chosen, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: {getattr(chosen, name)!r} is not allowed without --network")
        return None
    from jaxdp import prediction
    from jaxdp.parallel.cost_model import parse_network

    rate = chosen.images_per_second
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--images-per-second: {rate} is not allowed; give a number above 0")
    told = prediction.predict(plan, summary, *parse_network(chosen.network), rate)
    shown = [*prediction.tables(told), *prediction.remarks(told)]
    if chosen.picture is not None:
        if not chosen.picture.endswith(".png"):
            raise ConfigError(f"--picture: {chosen.picture!r} is not allowed; give a file that ends in .png")
        output, picture = check_output(chosen.picture, chosen.overwrite, "--picture"), io.BytesIO()
        prediction.draw(told, picture)
        write_whole(output, picture.getvalue())
        shown.append(f"picture in {chosen.picture}")
    return told, shown


def _compiled(chosen, config, plan, summary):
    if chosen.compile_for is None:
        if chosen.phase:
            raise ConfigError(f"--phase: {chosen.phase} is not allowed without --compile-for")
        return None
    from jaxdp import aot

    devices = _devices_of(chosen)
    if devices is None:
        raise ConfigError("--compile-for: give --hosts and --gpus-per-host with it, for example --hosts 1 --gpus-per-host 8")
    compiled = aot.compile_for(plan, chosen.phase, chosen.compile_for, chosen.hosts, devices // chosen.hosts)
    return aot.as_dict(compiled), [aot.table(compiled)]
