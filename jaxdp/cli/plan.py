"""`jaxdp plan`: print the plan of a run, and predictions of its messages, step time and memory."""

import dataclasses
import itertools
import json
import math
import os
from typing import TYPE_CHECKING, Any, Literal

from jaxdp.cli.options import EVERYDAY, ConfigFields, Switch
from jaxdp.config import Config
from jaxdp.errors import ConfigError, plural, print_safe
from jaxdp.flags import parse
from jaxdp.planning import Plan, small_worker_warning
from jaxdp.recipes import load_recipe
from jaxdp.validation import validate
from jaxdp.xla.jax_options import jaxdp_jax_config

if TYPE_CHECKING:
    from rich.table import Table

    from jaxdp.loggers.console import Screen


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """Print phases, steps, hyperparameters, parameters, multiply-adds, bytes of inputs and state, and gradient bytes of a run.

    Examples:
      jaxdp plan
      jaxdp plan --config imagenet_sony_exp2 --devices 8 --json
      jaxdp plan --config imagenet_goyal_256 --devices 8 --images-per-second 2500
      jaxdp plan --config finetune --parameters --finetune.layer-decay 0.75
      jaxdp plan --config imagenet_sony_exp2 --devices 3456 --wire --network 5e-6,10e9
      jaxdp plan --config imagenet_sony_exp1 --compile-for h200 --hosts 272 --gpus-per-host 8
      jaxdp plan --config imagenet_goyal_256 --compile-for v5e:2x4
    """

    run: ConfigFields = dataclasses.field(default_factory=Config)
    config: str = "digits"
    """Recipe: a name in configs/, a .py file with config(), or a saved config.json"""
    devices: int | None = None
    """Number of devices (None: hosts x gpus-per-host, or the devices of this machine)"""
    hosts: int = 1
    """Number of hosts, the rows of the mesh, among which the devices are divided evenly"""
    gpus_per_host: int | None = None
    """Number of devices per host"""
    gpu: str | None = None
    """GPU whose memory must hold the run, such as a100, h100 or rtx4090 (None: the GPUs of this machine)"""
    parameters: Switch = False
    """Every parameter: path, shape, group of optimizer.groups, and factors on learning rate and weight decay"""
    wire: Switch = False
    """Collectives of a step: axis, type, bytes and number of each kind"""
    network: str | None = None
    """LATENCY,BANDWIDTH[,DEVICE] in seconds and bytes/s, for example 5e-6,10e9, or a TPU (v5e, v5p, v6e): predicts step time
    and efficiency of each strategy. BANDWIDTH: of a device's link, or with --hosts of a host's; DEVICE: of a device itself,
    inside its host too"""
    images_per_second: float | None = None
    """Training speed of one device in images/s, from `jaxdp bench step`: predicts the hours of the run. With --network
    the speed without communication (None: the paper's V100, scaled by multiply-adds)"""
    compile_for: str | None = None
    """What XLA compiles the step for: the GPU a100, h100 or h200 (extra cuda13), or a TPU slice (extra tpu), such as v5e:4x8
    or Google Cloud's name v5litepod-32. None has to be there"""
    phase: int = 0
    """Index of the phase to compile"""
    step: Literal["training", "evaluation"] = "training"
    """Step to compile"""
    json: Switch = False
    """Output as one JSON document"""


def run(arguments: list[str], program: str) -> None:
    recipe = load_recipe(arguments, default="digits", notes=True)
    options = parse(PlanCommand, arguments, program, default=PlanCommand(run=recipe.config), everyday=EVERYDAY)
    config = validate(options.run)
    _print_plan(_with_target(options), config, recipe.note)


def _with_target(options: PlanCommand) -> PlanCommand:
    """The options with the target as JAX names it. Raises ConfigError for options that make no sense with it or without."""
    if options.compile_for is not None:
        from jaxdp.analysis import aot

        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # leave GPUs of this machine alone
        return dataclasses.replace(options, compile_for=aot.check_target(options.compile_for))
    for name in ("phase", "step"):
        if (value := getattr(options, name)) != getattr(PlanCommand, name):
            raise ConfigError(f"--{name}", value, reason="requires --compile-for")
    return options


@jaxdp_jax_config()
def _print_plan(options: PlanCommand, config: Config, note: str | None) -> None:
    import jaxdp
    from jaxdp.analysis import aot, memory
    from jaxdp.distributed import runtime
    from jaxdp.loggers.console import Screen
    from jaxdp.loggers.plan_table import as_dict, summary_table
    from jaxdp.models import finetune
    from jaxdp.sizes import model_summary

    devices, rate = _number_of_devices(options), options.images_per_second
    on_slice = aot.sizes_of(options.compile_for) if options.compile_for in aot.SLICES else {}
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError("--images-per-second", rate, reason="must be greater than 0")
    _, given = finetune.read_weights(config)  # raises what a run would
    plan = jaxdp.plan(config, devices, on_slice.get("processes", options.hosts), rows=on_slice.get("rows"))
    if options.compile_for is not None:
        aot.phase_of(plan, options.phase)
    if given is not None:
        finetune.initial_values(finetune.with_digest(plan.config, given.digest), given)
    summary = model_summary(plan.config)
    needed = memory.estimate(plan, summary)
    hours = None if rate is None else plan.training_hours(rate)
    document: dict[str, Any] = as_dict(plan, summary) | {"memory_bytes": needed, "training_hours": hours}
    parts: list[Any] = []
    if not options.json:
        described = f"{devices}, as given" if devices else runtime.describe(runtime.start(config.mesh))
        parts += [note] if note else []
        parts.append(summary_table(plan, described, summary, device_memory=memory.describe(plan, needed), rate=rate))
    if warning := small_worker_warning(plan, has_batch_norm=bool(summary["statistics"])):
        document["batch_norm_warning"] = warning
        parts.append(warning)
    if text := _memory_verdict(options, plan, needed, given=devices is not None):
        document["memory_verdict"] = text
        parts.append(text)
    if layouts := _layouts(options, plan):
        document["layouts"] = layouts
        parts += layouts
    for name, section in (("parameters", _parameters), ("wire", _wire), ("network", _network)):
        if (result := section(options, plan, summary)) is not None:
            document[name], section_parts = result
            parts += section_parts
    screen = Screen(quiet=options.json)
    _show(screen, parts)
    if options.compile_for is not None:
        document["compiled"], compiled = _compiled(options, plan, devices or 0)  # takes minutes
        screen.info("")
        _show(screen, [compiled])
    if options.json:
        print_safe(json.dumps(document, indent=2))


def _show(screen: "Screen", parts: list) -> None:
    """Print tables and paragraphs, with empty lines between them."""
    for number, part in enumerate(parts):
        if number:
            screen.info("")
        (screen.info if isinstance(part, str) else screen.table)(part)


def _memory_verdict(options: PlanCommand, plan: Plan, needed: dict[str, int], *, given: bool) -> str | None:
    """Whether the named GPU can hold the run; a warning if this machine's cannot.

    given: whether the devices are not this machine's.
    """
    from jaxdp.analysis import memory
    from jaxdp.distributed import runtime

    gpu = options.gpu or (options.compile_for if options.compile_for in memory.GPU_MEMORY else None)
    if gpu:
        limit = memory.usable_bytes(gpu)
        fits = f"{gpu} can hold this run: JAX uses {limit / 1e9:,.1f} GB of its memory"
        return memory.warning(plan, needed, limit=limit, device=gpu) or fits
    if given:
        return None
    device = runtime.start(plan.config.mesh)[0]
    found = (device.memory_stats() or {}).get("bytes_limit")
    return memory.warning(plan, needed, limit=found, device=device.device_kind) if found else None


def _layouts(options: PlanCommand, plan: Plan) -> list[str]:
    """How the meshes of the phases lie on a TPU slice: the one to compile for, or this machine's."""
    from jaxdp.parallel.torus import describe_layout
    from jaxdp.training.step_compiler import mesh_of

    if not (devices := _slice(options, plan)):
        return []
    found = (describe_layout(mesh_of(phase, devices), devices) for phase in plan.phases)
    return [line for line in dict.fromkeys(found) if line]


def _slice(options: PlanCommand, plan: Plan) -> list[Any]:
    """The devices of the TPU slice to compile for, or of this machine; [] without one."""
    from jaxdp.analysis import aot
    from jaxdp.distributed import runtime

    if options.compile_for in aot.SLICES:
        return aot.devices_of(options.compile_for)
    found = [] if _number_of_devices(options) else runtime.start(plan.config.mesh)
    return [device for device in found if device.platform == "tpu"]


def _number_of_devices(options: PlanCommand) -> int | None:
    """The number of devices given by the options; None: the devices of this machine. Raises ConfigError for a contradiction."""
    from jaxdp.analysis import tpu_targets

    given, name = _given_devices(options), options.compile_for
    chips = math.prod(sides) if (sides := tpu_targets.sides_of(name)) else given
    if given not in (None, chips):
        hint = "omit --devices, --hosts and --gpus-per-host"
        raise ConfigError("--compile-for", name, reason=f"is a slice of {chips} devices, not {given}", hint=hint)
    if name is not None and chips is None:
        reason, hint = "requires --hosts and --gpus-per-host", "for example --hosts 1 --gpus-per-host 8"
        raise ConfigError("--compile-for", name, reason=reason, hint=hint)
    return chips


def _given_devices(options: PlanCommand) -> int | None:
    """hosts x gpus-per-host, or devices."""
    for name in ("devices", "hosts", "gpus_per_host"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", value, reason="must be at least 1")
    devices = options.devices
    if options.gpus_per_host is not None:
        if devices not in (None, options.hosts * options.gpus_per_host):
            reason = f"contradicts --hosts {options.hosts} --gpus-per-host {options.gpus_per_host}"
            raise ConfigError("--devices", devices, reason=reason, hint="omit one of them")
        return options.hosts * options.gpus_per_host
    if options.hosts > 1 and devices is None:
        raise ConfigError("--hosts", options.hosts, reason="requires --gpus-per-host or --devices")
    if devices is not None and devices % options.hosts:
        raise ConfigError("--hosts", options.hosts, reason=f"must divide the {plural(devices, 'device')}")
    return devices


Section = tuple[Any, list] | None  # (part of the JSON document, tables and paragraphs to print)


def _parameters(options: PlanCommand, plan: Plan, summary: dict[str, Any]) -> Section:
    if not options.parameters:
        return None
    from rich.table import Table

    from jaxdp import models
    from jaxdp.optim.groups import listed_parameters

    model, size = models.create(plan.config.model, platform="any"), plan.config.data.image_size
    listed = listed_parameters(plan.config, model, models.initial_shapes(model, (size, size, 3))[0])
    table = Table("path", "shape", "group", "rate", "decay", box=None, padding=(0, 2, 0, 0))
    for row in listed:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        table.add_row(row["path"], shape, row["group"] or "-", f"{row['rate']:.4g}", f"{row['decay']:.4g}")
    return listed, [table]


def _wire(options: PlanCommand, plan: Plan, summary: dict[str, Any]) -> Section:
    """The collectives of a step; phases with the same ones share a table."""
    if not options.wire:
        return None
    from jaxdp.analysis import wire
    from jaxdp.analysis.wire import plan_traffic

    steps = plan_traffic(plan)
    return [wire.as_dict(step) for step in steps], [wire.table(step) for step in steps]


def _network(options: PlanCommand, plan: Plan, summary: dict[str, Any]) -> Section:
    if options.network is None:
        return None
    from jaxdp.analysis import network_model
    from jaxdp.analysis.wire import normalization_messages
    from jaxdp.parallel.torus import hops
    from jaxdp.training.step_compiler import mesh_of

    network, first = network_model.parse_network(options.network), plan.phases[0]
    if network.tpu:
        chips = _slice(options, plan)
        found = [hops(mesh_of(phase, chips).devices, chips) for phase in plan.phases] if chips else []
        network = network._replace(hops=max([1, *itertools.chain(*found)]))
    else:
        network = network._replace(gloo=plan.config.mesh.cpu_devices is not None)
        if options.hosts > 1 or network.device_bandwidth < math.inf:
            network = network._replace(devices_per_host=(first.devices + first.idle_devices) // options.hosts)
    messages = normalization_messages(plan)
    prediction = network_model.predict(plan, summary, network, rate=options.images_per_second, normalization_messages=messages)
    return prediction, [*network_model.tables(prediction), *network_model.notes(prediction)]


def _compiled(options: PlanCommand, plan: Plan, devices: int) -> tuple[dict[str, Any], "Table"]:
    from jaxdp.analysis import aot

    per_host = devices // options.hosts
    target: dict[str, Any] = {"target": options.compile_for, "hosts": options.hosts, "gpus_per_host": per_host}
    compiled = aot.compile_for(plan, options.phase, step=options.step, **target)
    return aot.as_dict(compiled), aot.table(compiled)
