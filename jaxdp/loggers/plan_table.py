"""The plan of a run as the table that `jaxdp plan` and the start of a run print, and as a JSON document."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxdp import metrics
from jaxdp.choices import LOSSES, OPTIMIZERS, TASKS, kind_of_task
from jaxdp.config import RESNET, Finetune
from jaxdp.config_words import (
    HELD_OUT_LABELS,
    evaluation_words,
    finetuning_words,
    optimizer_words,
    policy_words,
    training_labels,
)
from jaxdp.errors import plural
from jaxdp.metrics import METRICS
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.schedules import GOYAL_BATCH, SCHEDULES
from jaxdp.sizes import input_bytes, state_bytes

if TYPE_CHECKING:
    from rich.table import Table

START_ROWS = {"run", "model", "data", "devices", "all-reduce", "optimizer", "schedule", "loss", "early stopping", "phase"}
START_ROWS |= {"fine-tuning"}


def as_dict(plan: Plan, model_summary: dict[str, Any]) -> dict[str, Any]:
    """The JSON document of `jaxdp plan`. Learning rates are sampled at 21 steps per phase, with the first and the last."""
    config = plan.config
    return {
        "name": config.name,
        "examples": plan.examples,
        "epochs": config.epochs,
        "phases": [dataclasses.asdict(phase) for phase in plan.phases],
        "learning_rate": [[samples / plan.examples, plan.learning_rate(samples)] for samples in _sample_points(plan)],
        "total_steps": plan.total_steps,
        "total_samples": plan.total_samples,
        "config": dataclasses.asdict(config),
        "input_bytes": input_bytes(plan),
        "state_bytes": state_bytes(plan, model_summary),
        "model": {name: model_summary[name] for name in ("parameters", "macs", "decayed", "not_decayed")},
        "gradient_bytes": model_summary["gradient_bytes"],
        "statistics_bytes": model_summary["statistics_bytes"],
        "gathered_bytes": sum(model_summary["gathered_messages"]) if config.reduce.update == "sharded" else 0,
    }


def start_table(plan: Plan, devices: str, model_summary: dict[str, Any]) -> "Table":
    """The table that a run prints at its start: the rows of `summary_table` that identify the run."""
    table = _table([row for row in _rows(plan, devices, model_summary) if row[0].rstrip("0123456789 ") in START_ROWS])
    table.caption = "jaxdp plan prints sizes, memory and learning rates"
    return table


def summary_table(
    plan: Plan, devices: str, model_summary: dict[str, Any], *, device_memory: str = "", rate: float | None = None
) -> "Table":
    """The table of `jaxdp plan`: model, data, devices, optimizer and phases.

    devices: description of the devices. device_memory: estimate of the memory per device; "": none.
    rate: images/s of one device, to predict the hours.
    """
    rows = _rows(plan, devices, model_summary)
    rows.insert(1, ("length", f"{plural(plan.total_samples, 'image', ',')}; {_describe_hours(plan, rate)}"))
    if device_memory:
        rows.insert([label for label, _ in rows].index("devices"), ("memory", device_memory))
    return _table(rows)


def _table(rows: list[tuple[str, str]]) -> "Table":
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def _rows(plan: Plan, devices: str, model_summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, fact). A label of "" continues the previous row."""
    config, optimizer = plan.config, plan.config.optimizer
    size, sizes = config.data.image_size, {phase.image_size for phase in plan.phases}
    shown = " to ".join(f"{side}x{side}" for side in sorted({min(sizes), max(sizes)}))
    memory = input_bytes(plan)
    state, decayed, not_decayed = state_bytes(plan, model_summary), model_summary["decayed"], model_summary["not_decayed"]
    parts = ", ".join(f"{part.replace('_', ' ')} {_megabytes(size)}" for part, size in state.items())
    gradient = f"{model_summary['gradient_bytes']:,} bytes"
    whole = f"{plan.total_samples / plan.examples:.1f}"
    rounded = f" (whole steps make it {whole})" if whole != f"{config.epochs:.1f}" else ""
    epochs = plural(config.epochs, "epoch", "g") + rounded
    drawn = {"balanced": ", classes equally often", "weights": ", by weights"}.get(config.data.sampling, "")
    divided = "each class" if kind_of_task(config.task) == "classes" else "the images"
    drawn += f", {config.data.holdout:.3g} of {divided} held out" * bool(config.data.holdout)
    loss = LOSSES[optimizer.loss].title if optimizer.loss in LOSSES.builtin else f"{optimizer.loss}, registered"
    if TASKS[config.task].own:
        loss = f"of the task {config.task}"
    labels = [f"training: {training_labels(config)}", f"held-out: {HELD_OUT_LABELS}"]
    rows = [
        ("run", f"{config.name}, seed {config.seed}, {epochs}, {plural(plan.total_steps, 'step', ',')}"),
        ("model", f"{config.model.title}, {config.model.dtype}, {model_summary['parameters']:,} parameters"),
        ("compute", f"{model_summary['macs']:,} multiply-adds an image{f' of {size}x{size}' * (sizes != {size})}"),
        ("data", f"{config.data.source}, {plural(plan.examples, 'image', ',')} of {shown} an epoch{drawn}"),
        ("input", f"up to {_size(memory['host'])} per host, {_size(memory['device'])} per device for two batches"),
        ("state", f"{_megabytes(sum(state.values()))} MB per device: {parts}"),
        ("devices", devices),
    ]
    if max(phase.devices for phase in plan.phases) > 1:
        of_images = [metrics.title_of(name) for name in (config.first_metric,) if METRICS[name].of == "images"]
        statistics = ", ".join([*["batch statistics"] * bool(model_summary["statistics"]), "loss", *of_images])
        rows += [
            ("all-reduce", f"{config.reduce.strategy}, {gradient} of gradients in {config.reduce.wire_dtype}"),
            ("", f"{model_summary['statistics_bytes']:,} bytes of {statistics} and requests in float32"),
        ]
        if config.reduce.update == "sharded":
            gathered = f"{sum(model_summary['gathered_messages']):,} bytes of parameters"
            rows.append(("", f"sharded update: gathers {gathered} in the dtypes of the network, in place of gradients"))
    else:
        rows.append(("all-reduce", f"none on one device, {gradient} of gradients"))
    rows += [
        ("optimizer", optimizer_words(optimizer)),
        ("schedule", _describe_schedule(plan)),
        ("loss", "; ".join(filter(None, [loss, *labels]))),
        ("settings", _describe_settings(plan, has_batch_norm=bool(model_summary["statistics"]))),
    ]
    if gathering := [metrics.title_of(name) for name in metrics.names(config.task) if METRICS[name].of == "all"]:
        size = model_summary["output_bytes"] + model_summary["target_bytes"] + 4  # and a weight
        rows.append(("metrics", f"{', '.join(gathering)}: {size:,} bytes for each held-out image on every host"))
    if config.stop.patience is not None:
        rows.append(("early stopping", _describe_stopping(plan, config.stop.patience)))
    if config.finetune != Finetune():
        rows.append(("fine-tuning", finetuning_words(config)))
    rows.append(
        (
            "weight decay",
            "as the registered optimizer applies it"
            if optimizer.name in OPTIMIZERS.registered
            else f"on {decayed['tensors']} tensors with {decayed['parameters']:,} parameters, not on "
            f"{not_decayed['tensors']} with {not_decayed['parameters']:,}",
        )
    )
    for phase in plan.phases:
        idle = f", {phase.idle_devices} idle" if phase.idle_devices else ""
        trained = ", all stages trained" * phase.unfrozen
        micro = f" x {phase.accumulation} micro-batches" if phase.accumulation > 1 else ""
        images = f", images of {phase.image_size}x{phase.image_size}"
        rows += [
            (
                f"phase {phase.index}",
                f"epoch {phase.first_epoch:.2f} to {phase.last_epoch:.2f}, {plural(phase.steps, 'step', ',')}, batch "
                f"{phase.global_batch} = {plural(phase.devices, 'device')} ({phase.vertical}x{phase.horizontal}) x "
                f"{phase.per_worker_batch}{micro}{idle}{images if len(sizes) > 1 else ''}{trained}",
            ),
            ("", f"learning rate {_rates(plan, phase)}, momentum {phase.momentum:g}"),
        ]
    return rows


def _describe_schedule(plan: Plan) -> str:
    """The schedule with its learning rate, the scaled rate for each batch, and its warm-up."""
    schedule, batches = plan.config.schedule, {phase.global_batch for phase in plan.phases}
    anew = f", from epoch {schedule.from_epoch:.2f} on" if schedule.from_epoch else ""
    if schedule.name not in SCHEDULES.builtin:
        return f"{schedule.name}, registered{anew}"
    rate, start = f"learning rate {schedule.learning_rate:g}", ""
    if schedule.name == "goyal" and batches != {GOYAL_BATCH}:
        scaled = (f"{schedule.learning_rate * batch / GOYAL_BATCH:.4g} at batch {batch}" for batch in sorted(batches))
        rate += f" at batch {GOYAL_BATCH}, scaled to {', '.join(scaled)}"
        start = f" from {plan.learning_rate(plan.schedule_start):.4g}"
    return f"{schedule.name}, {rate}, {plural(schedule.warmup_epochs, 'epoch', '.3g')} of warm-up{start}{anew}"


def _describe_hours(plan: Plan, rate: float | None) -> str:
    if rate is None:
        return "--images-per-second N, the speed of one device by `jaxdp bench step`, predicts the hours"
    hours = plural(plan.training_hours(rate), "hour", ",.2g" if plan.training_hours(rate) < 10 else ",.0f")
    size = plan.config.data.image_size
    scaled = any(phase.image_size != size for phase in plan.phases)
    of_size = f" of {size}x{size}" * scaled
    others = ", for other sizes in proportion to their pixels" * scaled
    return f"{hours} at {rate:,.6g} images/s{of_size} per device{others}, without start-up, evaluation and checkpoints"


def _size(size: int) -> str:
    return f"{size / 1e3:,.0f} KB" if size < 1e6 else f"{_megabytes(size)} MB"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.{1 if size < 1e7 else 0}f}"


def _describe_settings(plan: Plan, *, has_batch_norm: bool) -> str:
    """Batch normalization, loss scaling and augmentation."""
    config = plan.config
    model, data, scale = config.model, config.data, config.optimizer.loss_scale
    words = []
    if has_batch_norm:
        statistics = "moving averages" if model.norm_momentum else "the last batch"
        words.append(f"batch norm {model.norm.replace('_', ' ')}, evaluated with {statistics}")
        if model.name == RESNET and model.resolved_batch_norm == "folded":
            words.append("folded into the convolutions before it")
    if scale != "none":
        words.append("dynamic loss scale" if scale == "dynamic" else f"loss scale {scale:g}")
    if model.drop_path:
        words.append(f"drop-path {model.drop_path:g}")
    words.append(f"augmentation {data.augmentation.replace('_', ' ')}")
    if data.stored_size not in (None, data.image_size):
        words[-1] += f" from {data.stored_size}x{data.stored_size}"
    words += policy_words(config)
    if data.sets_evaluation or data.mean or data.std:
        words.append(evaluation_words(config))
    if data.mix != "none":
        words.append(f"{data.mix.replace('_', ' ')} ({'mixup ' * (data.mix == 'mixup_or_cutmix')}alpha {data.mix_alpha:g})")
    if model.remat:
        words.append("activations recomputed in the backward pass")
    return ", ".join(words)


def _describe_stopping(plan: Plan, patience: int) -> str:
    evaluations = plan.evaluations_before_end
    waits = f"when {plan.config.deciding_metric} has not improved for {plural(patience, 'evaluation')} in a row"
    return f"{waits} ({evaluations} before the end); the result is the best checkpoint"


def _rates(plan: Plan, phase: PlannedPhase) -> str:
    """The first and the last learning rate of a phase, and the highest if it is neither; from the schedule's start on."""
    first_step, stride = _first_scheduled_step(plan, phase), max(1, phase.steps // 10_000)
    if first_step >= phase.steps:
        return f"as before the schedule's start at epoch {plan.config.schedule.from_epoch:.2f}"
    steps = sorted({*range(first_step, phase.steps, stride), phase.steps - 1})
    rates = [plan.learning_rate(phase.first_sample + step * phase.global_batch) for step in steps]
    first, highest, last = (f"{rate:.4g}" for rate in (rates[0], max(rates), rates[-1]))
    return f"{first} to {last}" if highest in (first, last) else f"{first} up to {highest}, then down to {last}"


def _sample_points(plan: Plan) -> list[int]:
    points = set()
    for phase in plan.phases:
        first = _first_scheduled_step(plan, phase)
        picks = {round(first + i * (phase.steps - 1 - first) / 20) for i in range(21) if first < phase.steps}
        points |= {phase.first_sample + pick * phase.global_batch for pick in picks}
    return sorted(points)


def _first_scheduled_step(plan: Plan, phase: PlannedPhase) -> int:
    """The number of steps of a phase before the schedule's start."""
    return max(0, -(-(plan.schedule_start - phase.first_sample) // phase.global_batch))
