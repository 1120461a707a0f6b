"""Plan of a run: phases, steps, devices and hyperparameters, computed from a Config before anything is compiled."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from jaxdp import schedules
from jaxdp.config import RESNET, Config, Phase, at_image_size, phase_image_size, unfrozen
from jaxdp.errors import ConfigError, plural
from jaxdp.fields import LARGEST
from jaxdp.parallel.mesh import choose_shape
from jaxdp.strategies import unsupported_reason
from jaxdp.validation import check_class_weights, check_stop, check_targets

FEW_VALUES = 8  # of batch normalization: statistics of fewer images or values are noisy


@dataclass(frozen=True)
class PlannedPhase:
    """A batch phase on the available devices.

    first_sample: samples seen before its first step. first_epoch, last_epoch: where its steps start and end. vertical,
    horizontal: shape of its mesh. accumulation: workers (ghost batches) per device. local_devices: devices of its mesh in each
    process. Batches are numbers of images. image_size: height and width of its training images, in pixels. normalized_values:
    the fewest values of a channel over which batch normalization averages, if they are at most FEW_VALUES; else None. unfrozen:
    whether it begins after `finetune.unfreeze_epoch`, which divides a batch phase into two with the same index.
    """

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
    image_size: int
    unfrozen: bool = False
    normalized_values: int | None = None

    def config_of(self, config: Config) -> Config:
        """The config of its training steps."""
        config = at_image_size(config, self.image_size)
        return unfrozen(config) if self.unfrozen else config

    @property
    def devices(self) -> int:
        """Number of devices of its mesh."""
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
        """Images per step on each device."""
        return self.global_batch // self.devices


@dataclass(frozen=True)
class Plan:
    """Everything about a run that follows from its config, the number of training images and the number of devices.

    examples: number of training images. phases: those with at least one step.
    """

    config: Config
    examples: int
    phases: tuple[PlannedPhase, ...]

    @property
    def total_steps(self) -> int:
        """Steps of the run."""
        return sum(phase.steps for phase in self.phases)

    @property
    def total_samples(self) -> int:
        """Samples seen at the end of the run."""
        return self.phases[-1].end

    @property
    def schedule_start(self) -> int:
        """Samples seen at the first step that the schedule gives a rate."""
        first = self.config.schedule.from_epoch
        samples = round(first * self.examples)  # exact for the epoch of a checkpoint
        return samples if samples / self.examples >= first else samples + 1

    @property
    def evaluations_before_end(self) -> int:
        """Evaluations before that at the end of the run; an upper bound if an interval is shorter than a step."""
        if self.config.evaluation.every_epochs is None:
            return 0
        interval = Fraction(str(self.config.evaluation.every_epochs)) * self.examples
        return min(self.total_steps - 1, math.floor((self.total_samples - self.phases[-1].global_batch) / interval))

    def training_hours(self, images_per_second: float) -> float:
        """Hours of all steps if each device that a phase uses trains `images_per_second` of `data.image_size`.

        Images of another size are assumed to take time in proportion to their pixels.
        """
        size = self.config.data.image_size
        images = sum(phase.steps * phase.per_device_batch * (phase.image_size / size) ** 2 for phase in self.phases)
        return images / images_per_second / 3600

    def phase_at(self, samples: int) -> int:
        """The index of the phase of the step that starts after `samples` samples."""
        return max(i for i, phase in enumerate(self.phases) if phase.first_sample <= samples)

    def phase_before(self, samples: int) -> PlannedPhase:
        """The phase of the step that ends at `samples` samples seen; the first phase for 0."""
        return self.phases[self.phase_at(max(0, samples - 1))]

    def first_step_from(self, samples: int) -> int:
        """Samples seen at the first step that starts at or after `samples`; `total_samples` if none does."""
        if samples >= self.total_samples:
            return self.total_samples
        phase = self.phases[self.phase_at(samples)]
        return samples + (phase.first_sample - samples) % phase.global_batch

    def steps_after(self, samples: int) -> int:
        """The number of steps that remain after `samples` samples seen."""
        return sum(-(-max(0, phase.end - max(samples, phase.first_sample)) // phase.global_batch) for phase in self.phases)

    def learning_rate(self, samples: int) -> float:
        """The learning rate of the step that starts after `samples` samples, at least `schedule_start`.

        A run that resumed with another batch may start its last step after `epochs`: its rate is that at `epochs`.
        """
        batch = self.phases[self.phase_at(samples)].global_batch
        config, epoch = self.config, min(samples / self.examples, self.config.epochs)
        return schedules.learning_rate(config.schedule, epoch, epochs=config.epochs, global_batch=batch)


def make_plan(config: Config, *, examples: int, devices: int, processes: int = 1, rows: int | None = None) -> Plan:
    """The plan of a run.

    examples: number of training images. devices: number of devices, spread evenly over the processes; every phase uses the same
    number of each. rows: of the mesh, such as the number of hosts; default one for each process.
    Raises ConfigError if a phase cannot be formed.
    """
    rows = processes if rows is None else rows
    for name, count in (("devices", devices), ("processes", processes), ("rows", rows)):
        if count < 1:
            raise ConfigError(name, count, reason="must be at least 1")
    _check_warm_up(config)
    check_class_weights(config)
    check_targets(config)  # again, now that the number of classes is known
    check_stop(config)
    machine = _Machine(devices, processes, rows)
    phases, errors = [], {}
    for index, span in _spans(config, examples):
        try:
            phases.append(_plan_phase(config, index, span=span, examples=examples, machine=machine))
        except ConfigError as error:
            errors[str(error)] = error
    if errors:
        first, *others = errors.values()
        hint = "; also ".join(filter(None, [first.hint, *map(str, others)]))
        raise ConfigError(first.field, first.value, reason=first.reason, hint=hint)
    plan = Plan(config, examples, tuple(phases))
    if plan.total_samples >= 2**32:
        reason = f"{plan.total_samples} samples with {examples} training images; must be less than 2^32 samples"
        raise ConfigError("epochs", config.epochs, reason=reason)
    _check_rates(plan)
    epoch, last = config.finetune.unfreeze_epoch, plan.phases[-1]
    if epoch is not None and not last.unfrozen:
        reason = f"no step begins at or after it: the last one begins at epoch {(last.end - last.global_batch) / examples:.4g}"
        raise ConfigError("finetune.unfreeze_epoch", epoch, reason=reason, hint="use an earlier one, or omit it")
    return plan


def _spans(config: Config, examples: int) -> Iterator[tuple[int, tuple[int, int, bool]]]:
    """(index, (first sample, number of steps, whether they are after unfreezing)) of the parts of phases with steps."""
    epoch = config.finetune.unfreeze_epoch
    boundary = math.inf if epoch is None else samples_until(epoch, examples)
    for index, (first, steps) in enumerate(phase_steps(config.batch, config.epochs, examples)):
        batch = config.batch[index].global_batch
        before = min(steps, math.ceil(max(0, boundary - first) / batch)) if epoch is not None else steps
        for span in ((first, before, False), (first + before * batch, steps - before, True)):
            if span[1] > 0:
                yield index, span


@dataclass(frozen=True)
class _Machine:
    devices: int
    processes: int
    rows: int


def _plan_phase(config: Config, index: int, *, span: tuple[int, int, bool], examples: int, machine: _Machine) -> PlannedPhase:
    """One phase with its mesh. span: (first sample, steps, unfrozen)."""
    phase, (first_sample, steps, is_unfrozen) = config.batch[index], span
    if phase.global_batch > examples:
        reason = f"the training set has only {plural(examples, 'image')}"
        hint = f"use {_fitting_batch(index, phase.per_worker_batch, examples)}"
        raise ConfigError(f"batch.{index}.global_batch", phase.global_batch, reason=reason, hint=hint)
    vertical, horizontal = _mesh_shape(config, index, machine)
    used = vertical * horizontal
    if unsupported := unsupported_reason(config.reduce.strategy, used):
        reason = f"batch.{index} uses {plural(used, 'device')}; {unsupported}"
        raise ConfigError("reduce.strategy", config.reduce.strategy, reason=reason, hint="choose another")
    per_worker = phase.per_worker_batch or phase.global_batch // used
    if config.data.mix != "none" and per_worker < 2:
        reason = f"batch.{index} has one image per worker and mixing needs two"
        raise ConfigError("data.mix", config.data.mix, reason=reason, hint="increase per_worker_batch or global_batch")
    workers = phase.global_batch // per_worker
    planned = PlannedPhase(
        index=index,
        first_sample=first_sample,
        steps=steps,
        first_epoch=first_sample / examples,
        last_epoch=(first_sample + steps * phase.global_batch) / examples,
        global_batch=phase.global_batch,
        per_worker_batch=per_worker,
        workers=workers,
        vertical=vertical,
        horizontal=horizontal,
        accumulation=workers // used,
        idle_devices=machine.devices - used,
        momentum=_momentum(config, index),
        local_devices=used // machine.processes,
        image_size=phase_image_size(config, index),
        unfrozen=is_unfrozen,
    )
    if config.model.name == RESNET and per_worker > FEW_VALUES:  # in every layer
        return planned
    from jaxdp.models.summary import fewest_values

    values = fewest_values(config, planned)
    return replace(planned, normalized_values=int(values) if values <= FEW_VALUES else None)


def _fitting_batch(index: int, per_worker: int | None, examples: int) -> str:
    """Flags for a global batch of at most `examples` images: whole per-worker batches, or a power of two."""
    flag, power = f"--batch.{index}.global-batch", 1 << (max(1, examples).bit_length() - 1)
    if per_worker is None:
        return f"{flag} {power}"
    if per_worker > examples:
        return f"{flag} {power} --batch.{index}.per-worker-batch {power}"
    return f"{flag} {examples // per_worker * per_worker}"


def _mesh_shape(config: Config, index: int, machine: _Machine) -> tuple[int, int]:
    """The mesh of one phase: as configured, or over as many devices as divide the phase's workers (or its batch)."""
    phase, mesh = config.batch[index], config.mesh
    field = f"batch.{index}.global_batch"
    if phase.per_worker_batch is None:
        shares, shared = phase.global_batch, f"global batch {phase.global_batch}"
    else:
        shares = phase.global_batch // phase.per_worker_batch
        shared = f"{plural(shares, 'worker')} ({phase.global_batch} / {phase.per_worker_batch})"
    sides = {"mesh.vertical": mesh.vertical, "mesh.horizontal": mesh.horizontal}
    given = {name: side for name, side in sides.items() if side is not None}
    omit = f", or omit {' and '.join(given)}" if given else ""
    if len(given) == 2:
        unit = math.prod(choose_shape(mesh, machine.devices, machine.rows))
        if unit % machine.processes:
            reason = f"{plural(unit, 'device')} cannot be divided evenly among {plural(machine.processes, 'process')}"
            raise ConfigError(
                "mesh", f"{mesh.vertical}x{mesh.horizontal}", reason=reason, hint="omit mesh.vertical or mesh.horizontal"
            )
        usable = [unit] if shares % unit == 0 else []
    else:
        unit = math.lcm(mesh.vertical or mesh.horizontal or 1, machine.processes)
        if unit > machine.devices:
            choose_shape(mesh, machine.devices, machine.rows)  # raises: there are not enough devices
        usable = [n for n in range(unit, min(machine.devices, shares) + 1, unit) if shares % n == 0]
    if not usable:
        unit *= phase.per_worker_batch or 1
        near = max(unit, (phase.global_batch + (unit - 1) // 2) // unit * unit)
        divisors = [f"{name}={side}" for name, side in given.items()]
        divisors += [plural(machine.processes, "process")] * (machine.processes > 1)
        reason = f"{shared} cannot be divided evenly among {' and '.join(divisors)}"
        raise ConfigError(field, phase.global_batch, reason=reason, hint=f"use the nearest possible batch {near}{omit}")
    used = max(usable)
    return choose_shape(mesh, used, machine.rows)


def _momentum(config: Config, index: int) -> float:
    optimizer, batch = config.optimizer, config.batch[index].global_batch
    value = schedules.momentum(optimizer.momentum_rule, optimizer.momentum, global_batch=batch)
    if not 0 <= value < 1:
        reason = f"momentum is {value:.6g} at batch.{index}.global_batch={batch}; must be in [0, 1)"
        hint = f"change optimizer.momentum ({optimizer.momentum:g})"
        raise ConfigError("optimizer.momentum_rule", optimizer.momentum_rule, reason=reason, hint=hint)
    return value


def _check_warm_up(config: Config) -> None:
    """Raise ConfigError for a warm-up that lowers the learning rate, as of a recipe whose rate a flag has lowered."""
    schedule = config.schedule
    if schedule.warmup_epochs and schedule.start > schedule.learning_rate:
        reason = f"the warm-up would lower the rate from it to schedule.learning_rate ({schedule.learning_rate:g})"
        raise ConfigError("schedule.start", schedule.start, reason=reason, hint="use --schedule.start 0")


def _check_rates(plan: Plan) -> None:
    """Raise ConfigError for a learning rate out of range, which factors at many boundaries can cause."""
    schedule, examples = plan.config.schedule, plan.examples
    start = plan.schedule_start
    changes = {start + samples_until(epoch, examples) for epoch in (schedule.warmup_epochs, *schedule.boundaries)}
    last = plan.phases[-1]
    changes |= {last.end - last.global_batch, *(phase.first_sample for phase in plan.phases)}
    steps = {start} | {plan.first_step_from(samples) for samples in changes if samples > start}
    for samples in sorted(steps - {plan.total_samples}):
        try:
            rate = plan.learning_rate(samples)
        except OverflowError:
            rate = math.inf
        if not rate <= LARGEST:
            reason = f"the learning rate is {rate:.6g} at epoch {samples / examples:.2f}; must be at most {LARGEST:g}"
            hint = "reduce it or schedule.factor"
            raise ConfigError("schedule.learning_rate", schedule.learning_rate, reason=reason, hint=hint)


def small_worker_warning(plan: Plan, *, has_batch_norm: bool) -> str | None:
    """A warning, a line for each phase, of batch normalization over few values, or over workers of few images into which the
    devices divide the batch; None if there are none."""
    synchronized, lines = plan.config.model.norm == "synchronized", []
    for phase in plan.phases:
        given, values, worker = plan.config.batch[phase.index], phase.normalized_values, phase.per_worker_batch
        can_synchronize = phase.devices > 1 and not synchronized
        is_divided = has_batch_norm and can_synchronize and given.per_worker_batch is None
        if values is None and not (is_divided and worker <= FEW_VALUES):
            continue
        flag, images = f"--batch.{phase.index}.", worker * (phase.devices if synchronized else 1)
        reason, larger = f"workers of {plural(worker, 'image')} each, few for batch normalization", f"{flag}per-worker-batch"
        if images == phase.global_batch:
            larger = f"{flag}global-batch" + f" and {larger}" * (given.per_worker_batch is not None)
        if values not in (None, worker):
            reason = f"batch normalization averages over {values} values of each channel"
        if values and values > images:  # the maps have several positions
            reason += f", with images of {phase.image_size}x{phase.image_size}"
            larger += f", or {'--data.' if given.image_size is None else flag}image-size"
        larger += ", or --model.norm synchronized" * can_synchronize
        lines.append(f"batch.{phase.index}: {reason}; set a larger {larger}")
    return "\n".join(dict.fromkeys(lines)) or None


def interval_elapsed(every: float | None, *, unit: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` units of `unit` samples lies in (before, after]; False if `every` is None.

    The interval is exact for the decimal digits of `every`: 0.7 epochs of 50 samples are 35 samples.
    """
    if every is None:
        return False
    numerator, denominator = _interval(every, unit)
    return before * denominator // numerator < after * denominator // numerator


@cache
def _interval(every: float, unit: int) -> tuple[int, int]:
    """`every` units of `unit` samples, as (numerator, denominator)."""
    return (Fraction(str(every)) * unit).as_integer_ratio()


def samples_until(epoch: float, examples: int) -> int:
    """The first whole number of samples at or after `epoch`, which counts as the decimal that was written, without rounding."""
    return math.ceil(Fraction(str(epoch)) * examples)


def phase_steps(phases: tuple[Phase, ...], epochs: float, examples: int) -> list[tuple[int, int]]:
    """(first sample, number of steps) of every phase.

    A phase starts at the first step at which the samples seen reach the end of the previous phase. Steps are not split, so a
    phase may end up to one step late, and a phase inside that step has no steps.
    """
    seen, result = 0, []
    for phase in phases:
        end = samples_until(epochs if phase.until_epoch is None else phase.until_epoch, examples)
        steps = max(0, -(-(end - seen) // phase.global_batch))
        result.append((seen, steps))
        seen += steps * phase.global_batch
    return result
