"""Config -> Plan: phases, steps, devices and hyperparameters, known and printable before anything is compiled."""

import dataclasses
import math
from dataclasses import dataclass

from jaxdp import schedules
from jaxdp.config import Config, ConfigError, Finetune, Optimizer
from jaxdp.data.groups import AHEAD, rows_a_group
from jaxdp.parallel.buckets import pack
from jaxdp.parallel.mesh import choose_shape, unfit


@dataclass(frozen=True)
class PlannedPhase:
    """A batch phase on the devices at hand. Batches count images; first_epoch and last_epoch are where its steps lie;
    local_devices: those of its devices that one process has."""

    index: int
    first_sample: int
    steps: int
    first_epoch: float
    last_epoch: float
    global_batch: int
    per_worker_batch: int
    workers: int
    vertical: int
    horizontal: int
    accumulation: int
    idle_devices: int
    momentum: float
    local_devices: int

    @property
    def devices(self) -> int:
        return self.vertical * self.horizontal

    @property
    def shape(self) -> tuple[int, int]:
        """(vertical, horizontal)"""
        return self.vertical, self.horizontal

    @property
    def end(self) -> int:
        """Samples seen after its last step."""
        return self.first_sample + self.steps * self.global_batch

    @property
    def per_device_batch(self) -> int:
        return self.global_batch // self.devices


@dataclass(frozen=True)
class Plan:
    """What a run will do: its phases (those with at least one step) and everything that follows from samples seen."""

    config: Config
    examples: int
    phases: tuple[PlannedPhase, ...]

    @property
    def total_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def total_samples(self) -> int:
        return self.phases[-1].end

    def phase_at(self, samples: int) -> int:
        """The index of the phase of the step that starts at `samples` samples seen."""
        return max(i for i, phase in enumerate(self.phases) if phase.first_sample <= samples)

    def learning_rate(self, samples: int) -> float:
        """The rate of the step that starts at `samples` samples seen."""
        phase = self.phases[self.phase_at(samples)]
        epoch = samples / self.examples
        return schedules.learning_rate(self.config.schedule, self.config.epochs, epoch, phase.global_batch)


def make_plan(config: Config, examples: int, devices: int, hosts: int = 1, processes: int | None = None) -> Plan:
    """Phases of `config` on `devices` devices for a training set of `examples` images.

    hosts, processes: over which the devices are spread evenly; processes None: one for each host. Every phase uses equally many
    devices of each process. Raises ConfigError where a phase cannot be formed, with what could be.
    """
    if devices < 1:
        raise ConfigError(f"devices: {devices} is not allowed; give 1 or more")
    processes = hosts if processes is None else processes
    planned = []
    spans = schedules.phase_steps(config.batch, config.epochs, examples)
    for index, (phase, (first, steps)) in enumerate(zip(config.batch, spans, strict=True)):
        if steps == 0:
            continue
        if phase.global_batch > examples:
            raise ConfigError(
                f"batch.{index}.global_batch: {phase.global_batch} is not allowed; the training set has only {examples} "
                f"images; give --batch.{index}.global-batch {examples} or less"
            )
        vertical, horizontal = _shape_for(config, index, devices, hosts, processes)
        used = vertical * horizontal
        if reason := unfit(config.reduce.strategy, used):
            raise ConfigError(
                f"reduce.strategy: {config.reduce.strategy!r} is not allowed with batch.{index} on {used} devices; {reason}; "
                "give psum, ring, hierarchical, torus or auto"
            )
        per_worker = phase.per_worker_batch or phase.global_batch // used
        if config.data.mix != "none" and per_worker < 2:
            raise ConfigError(
                f"data.mix: {config.data.mix!r} is not allowed with batch.{index}; a worker has one image and nothing to mix "
                "it with; give a larger per_worker_batch or global_batch"
            )
        workers = phase.global_batch // per_worker
        planned.append(
            PlannedPhase(
                index=index,
                first_sample=first,
                steps=steps,
                first_epoch=first / examples,
                last_epoch=(first + steps * phase.global_batch) / examples,
                global_batch=phase.global_batch,
                per_worker_batch=per_worker,
                workers=workers,
                vertical=vertical,
                horizontal=horizontal,
                accumulation=workers // used,
                idle_devices=devices - used,
                momentum=_momentum(config, index),
                local_devices=used // processes,
            )
        )
    plan = Plan(config, examples, tuple(planned))
    if plan.total_samples >= 2**32:
        raise ConfigError(
            f"epochs: {config.epochs:g} is not allowed; with {examples} images an epoch and these batches the run would see "
            f"{plan.total_samples} samples, and fewer than 2^32 are allowed"
        )
    return plan


def _momentum(config: Config, index: int) -> float:
    optimizer, batch = config.optimizer, config.batch[index].global_batch
    value = schedules.momentum(optimizer.momentum_rule, optimizer.momentum, batch, optimizer.momentum_batch)
    if not 0 <= value < 1:
        raise ConfigError(
            f"optimizer.momentum_rule: {optimizer.momentum_rule!r} is not allowed with batch.{index}.global_batch {batch}; "
            f"it gives a momentum of {value:.6g}, and 0 up to below 1 is allowed"
        )
    return value


def _shape_for(config: Config, index: int, devices: int, hosts: int, processes: int) -> tuple[int, int]:
    """The mesh of one phase: as asked for, or over the most devices that divide its workers (or its batch)."""
    phase, mesh = config.batch[index], config.mesh
    if phase.per_worker_batch is None:
        shares, what = phase.global_batch, f"global batch {phase.global_batch}"
    else:
        shares = phase.global_batch // phase.per_worker_batch
        what = f"{shares} workers ({phase.global_batch} / {phase.per_worker_batch})"
    if mesh.vertical is not None and mesh.horizontal is not None:
        unit = math.prod(choose_shape(mesh, devices, hosts))
        side = f"{mesh.vertical}x{mesh.horizontal} mesh"
        if unit % processes:
            raise ConfigError(
                f"mesh: {mesh.vertical}x{mesh.horizontal} is not allowed; {processes} processes cannot share its {unit} "
                "devices evenly; leave the mesh to be chosen"
            )
        usable = [unit] if shares % unit == 0 else []
    else:
        unit = math.lcm(mesh.vertical or mesh.horizontal or 1, processes)
        side = f"mesh side of {unit}" if unit > processes else f"{processes} processes"
        if unit > devices:
            choose_shape(mesh, devices, hosts)  # says that there are not as many devices
        usable = [n for n in range(unit, min(devices, shares) + 1, unit) if shares % n == 0]
    if not usable:
        unit *= phase.per_worker_batch or 1
        near = max(unit, (phase.global_batch + (unit - 1) // 2) // unit * unit)
        raise ConfigError(
            f"batch.{index}.global_batch: {phase.global_batch} is not allowed; its {what} cannot be shared evenly by "
            f"the {side}; the nearest that can is {near}, or leave the mesh to be chosen"
        )
    used = max(usable)
    if used < devices and mesh.idle == "refuse":
        share = devices * (phase.per_worker_batch or 1)
        near = max(share, round(phase.global_batch / share) * share)
        raise ConfigError(
            f"mesh.idle: 'refuse' is not allowed with batch.{index} on {devices} devices; {used} of them can share its {what}; "
            f"the nearest global batch that uses all is {near}; or take {used} devices, or give --mesh.idle allow"
        )
    return choose_shape(mesh, used, hosts)


def model_summary(config: Config) -> dict:
    """Parameters, multiply-adds of one image, bytes on the wire (gradient, float32 statistics) and of each message, from the
    traced model."""
    from jaxdp import models

    size = config.data.image_size
    counted = models.summary(config.model, (size, size, 3), config.finetune.frozen_stages)
    width = {"float32": 4, "bfloat16": 2, "float16": 2}[config.reduce.wire_dtype]
    sizes, parts = counted.pop("sizes"), counted.pop("parts")
    messages = []
    trained = counted["adapted"]["parameters"] + counted["skipped"]["parameters"]
    for part in parts if config.reduce.overlap else [sizes]:  # tensors travel together only with others of their part
        tensors = [(size * width, "gradient") for name in sorted(part) for size in sizes[name]]
        packed = pack(tensors, config.reduce.bucket_bytes)
        messages += [sum(tensors[place][0] for place in places) for places in packed]
    statistics = 4 * counted["statistics"]
    return counted | {
        "gradient_bytes": trained * width,
        "statistics_bytes": statistics,
        "messages": [*messages, statistics],
    }


def as_dict(plan: Plan, model_summary: dict) -> dict:
    """The plan as `jaxdp plan --json` prints it; learning rates are sampled at phase borders and 20 points between."""
    config = plan.config
    return {
        "name": config.name,
        "examples": plan.examples,
        "epochs": config.epochs,
        "phases": [dataclasses.asdict(phase) for phase in plan.phases],
        "learning_rate": [[samples / plan.examples, plan.learning_rate(samples)] for samples in _sample_points(plan)],
        "total_steps": plan.total_steps,
        "total_samples": plan.total_samples,
        "optimizer": dataclasses.asdict(config.optimizer),
        "config": dataclasses.asdict(config),
        "input_bytes": input_bytes(plan),
        "strategy": config.reduce.strategy,
        "wire_dtype": config.reduce.wire_dtype,
        "model": {name: model_summary[name] for name in ("parameters", "macs", "adapted", "skipped")},
        "gradient_bytes": model_summary["gradient_bytes"],
        "statistics_bytes": model_summary["statistics_bytes"],
    }


def summary_table(plan: Plan, devices: str, model_summary: dict):
    """What a person wants to know before a run: model, data, devices (described), phases. A rich table."""
    from rich.table import Table

    config, optimizer, schedule = plan.config, plan.config.optimizer, plan.config.schedule
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("run", f"{config.name}, seed {config.seed}, {config.epochs:g} epochs, {plan.total_steps} steps")
    table.add_row(
        "model",
        f"{config.model.title}, {config.model.dtype}: {model_summary['parameters']:,} parameters, "
        f"{model_summary['macs']:,} multiply-adds an image",
    )
    size = config.data.image_size
    table.add_row("data", f"{config.data.source}: {plan.examples:,} images of {size}x{size} an epoch")
    held = input_bytes(plan)
    table.add_row(
        "input",
        f"up to {held['host'] / 1e6:,.0f} MB on a host, {held['device'] / 1e6:,.0f} MB on a device for {_held_there(config)}",
    )
    table.add_row("devices", devices)
    table.add_row(
        "gradient",
        f"{config.reduce.strategy} all-reduce of {model_summary['gradient_bytes']:,} bytes in {config.reduce.wire_dtype}, and "
        f"{model_summary['statistics_bytes']:,} of statistics in float32",
    )
    table.add_row(
        "optimizer",
        f"{_optimizer_in_words(optimizer)}, {schedule.name} learning rate with {schedule.warmup_epochs:g} epochs of warm-up",
    )
    table.add_row("settings", _settings_in_words(config))
    if config.finetune != Finetune():
        table.add_row("fine-tuning", _finetuning_in_words(config))
    adapted, skipped = model_summary["adapted"], model_summary["skipped"]
    what = "decay and trust ratio" if optimizer.name == "lars" else "decay"
    table.add_row(
        what,
        f"on {adapted['tensors']} tensors with {adapted['parameters']:,} parameters, not on {skipped['tensors']} with "
        f"{skipped['parameters']:,}",
    )
    for phase in plan.phases:
        idle = f", {phase.idle_devices} idle" if phase.idle_devices else ""
        micro = f" x {phase.accumulation} micro-batches" if phase.accumulation > 1 else ""
        table.add_row(
            f"phase {phase.index}",
            f"epoch {phase.first_epoch:.2f} to {phase.last_epoch:.2f}, {phase.steps} steps: "
            f"global batch {phase.global_batch} = {phase.devices} devices ({phase.vertical}x{phase.horizontal}) x "
            f"{phase.per_worker_batch}{micro}{idle}; learning rate {_rates(plan, phase)}, momentum {phase.momentum:g}",
        )
    return table


def input_bytes(plan: Plan) -> dict:
    """Bytes of images: on a host on their way to the devices, and on each device in two batches. The largest phase's.

    Where all images are kept on the devices, these are counted there and none are on their way.
    """
    data = plan.config.data
    host = device = 0
    for phase in plan.phases:
        group = rows_a_group(phase.per_device_batch, phase.local_devices, data.image_bytes, data.ahead_bytes)
        host = max(host, (AHEAD + 1) * group * phase.local_devices * data.image_bytes)
        device = max(device, 2 * phase.per_device_batch * data.image_bytes)
    if data.resident == "on":
        return {"host": 0, "device": plan.examples * data.image_bytes}
    return {"host": host, "device": device}


def _held_there(config: Config) -> str:
    return "all images" if config.data.resident == "on" else "two batches"


def _optimizer_in_words(optimizer: Optimizer) -> str:
    """The optimiser with what makes it differ from another of its name."""
    words = [f"{optimizer.name}{' with Nesterov momentum' if optimizer.nesterov else ''}"]
    if optimizer.name == "lars":
        words.append(f"trust coefficient {optimizer.trust_coefficient:g} ({optimizer.denominator.replace('_', ' ')})")
    words.append(f"weight decay {optimizer.weight_decay:g}, label smoothing {optimizer.label_smoothing:g}")
    if optimizer.momentum_rule != "constant":
        rule = optimizer.momentum_rule.replace("_", " ")
        words.append(f"momentum {optimizer.momentum:g} at {optimizer.momentum_batch} by the rule {rule!r}")
    if optimizer.clip_norm is not None:
        words.append(f"gradient clipped to norm {optimizer.clip_norm:g}")
    if optimizer.average_decay is not None:
        words.append(f"parameters averaged with decay {optimizer.average_decay:g} for evaluation")
    return ", ".join(words)


def _settings_in_words(config: Config) -> str:
    """Batch normalisation, precision and augmentation."""
    model, data, scale = config.model, config.data, config.loss_scale
    words = [f"batch norm {model.norm.replace('_', ' ')}, evaluated with the {model.statistics.replace('_', ' ')}"]
    if scale.name != "none":
        words.append(f"{scale.name} loss scale from {scale.initial:g}")
    words.append(f"augmentation {data.augmentation.replace('_', ' ')}")
    if data.stored_size not in (None, data.image_size):
        words[-1] += f" from {data.stored_size}x{data.stored_size}"
    if data.mix != "none":
        words.append(f"{data.mix} (alpha {data.mix_alpha:g})")
    if model.remat:
        words.append("activations recomputed")
    return ", ".join(words)


def _finetuning_in_words(config: Config) -> str:
    own = config.finetune
    frozen = ["the stem"] * (own.frozen_stages > 0)
    frozen += [f"{own.frozen_stages - 1} stage{'s' * (own.frozen_stages > 2)}"] * (own.frozen_stages > 1)
    words = [f"from {own.weights or 'random weights'}", f"{' and '.join(frozen)} frozen" if frozen else "nothing frozen"]
    words += ["a new classifier"] * own.new_head
    if own.head_multiplier != 1.0:
        words.append(f"learning rate of the classifier times {own.head_multiplier:g}")
    return ", ".join(words)


def _rates(plan: Plan, phase: PlannedPhase) -> str:
    """The first and the last learning rate of a phase, with the highest between them where it is neither."""
    stride = max(1, phase.steps // 10_000)
    steps = sorted({*range(0, phase.steps, stride), phase.steps - 1})
    rates = [plan.learning_rate(phase.first_sample + step * phase.global_batch) for step in steps]
    first, highest, last = (f"{rate:.4g}" for rate in (rates[0], max(rates), rates[-1]))
    return f"{first} to {last}" if highest in (first, last) else f"{first} up to {highest}, then down to {last}"


def _sample_points(plan: Plan) -> list[int]:
    points = set()
    for phase in plan.phases:
        picks = {round(i * (phase.steps - 1) / 20) for i in range(21)}
        points |= {phase.first_sample + pick * phase.global_batch for pick in picks}
    return sorted(points)
