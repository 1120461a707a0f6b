"""Summary of a plan: the table and the JSON document of `jaxdp plan`, with sizes of the network, messages and inputs."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxdp.choices import AUTO_AUGMENTS, LOSSES, OPTIMIZERS
from jaxdp.config import (
    HELD_OUT_LABELS,
    RESNET,
    Config,
    Finetune,
    Optimizer,
    at_image_size,
    evaluation_words,
    phase_image_size,
    training_labels,
)
from jaxdp.data.chunks import PREFETCH_DEPTH, rows_per_chunk
from jaxdp.errors import plural
from jaxdp.parallel.buckets import WIRE_BYTES, assign_buckets
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.schedules import GOYAL_BATCH

if TYPE_CHECKING:
    from rich.table import Table

START_ROWS = {"run", "model", "data", "devices", "all-reduce", "optimizer", "schedule", "loss", "fine-tuning", "phase"}
START_ROWS |= {"early stopping"}


def model_summary(config: Config) -> dict[str, Any]:
    """Sizes of the network, from a trace: parameters, multiply-adds of one image, bytes of the state on each device, and bytes
    per step and message of the gradient and, in float32, of the batch statistics with loss, accuracy and requests.

    gathered_messages: bytes of the parameters that a sharded update gathers, by message. norms_messages: of its messages of
    sums of squares.
    """
    from jaxdp.models.summary import check_image_size, summary

    size = config.data.image_size
    check_image_size(config.model, config.data.evaluated_size, trained=size, field="data.eval_size")
    for index in range(len(config.batch)):
        check_image_size(config.model, phase_image_size(config, index), trained=size, field=f"batch.{index}.image_size")
    counted = summary(config.model, (size, size, 3), config.finetune.frozen_stages)
    if config.optimizer.name == "lars" and config.optimizer.adapt == "all":
        decayed, rest = counted["decayed"], counted["not_decayed"]
        counted |= {"decayed": {key: decayed[key] + rest[key] for key in rest}, "not_decayed": dict.fromkeys(rest, 0)}
    width = WIRE_BYTES[config.reduce.wire_dtype]
    sizes, segments = counted.pop("sizes"), counted.pop("segments")
    messages = []
    trained = counted["decayed"]["parameters"] + counted["not_decayed"]["parameters"]
    for segment in segments if config.reduce.overlap else [sizes]:  # a bucket holds tensors of one segment only
        tensors = [(size * width, "gradient") for name in sorted(segment) for size in sizes[name]]
        buckets = assign_buckets(tensors, config.reduce.bucket_bytes)
        messages += [sum(tensors[index][0] for index in indices) for indices in buckets]
    statistics = 4 * (counted["statistics"] + len(("loss", "accuracy", "request to save", "request to stop")))
    gathered = _gathered_messages(config, counted["shapes"], segments) if config.reduce.update == "sharded" else []
    return counted | {
        "state_bytes": _state_bytes(config.optimizer, counted.pop("shapes"), counted.pop("trainable_shapes")),
        "gradient_bytes": trained * width,
        "statistics_bytes": statistics,
        "messages": [*messages, statistics],
        "gathered_messages": gathered,
        "norms_messages": _norms_messages(config.optimizer, counted["decayed"]["tensors"] + counted["not_decayed"]["tensors"]),
    }


def _norms_messages(optimizer: Optimizer, tensors: int) -> list[int]:
    """Bytes of the messages of sums of squares of a sharded update."""
    rule = OPTIMIZERS[optimizer.name]
    first = 4 * tensors * (1 + rule.uses_weight_norms)
    own_norm = rule.uses_weight_norms and optimizer.name != "lars"
    return [first, 4 * tensors] if own_norm else [first]  # of Adam's update


def _gathered_messages(
    config: Config, shapes: tuple[dict[str, Any], dict[str, Any]], segments: Sequence[Sequence[str]]
) -> list[int]:
    """Bytes of the messages of parameters that a sharded update gathers: all vectors, then the buckets of each segment.

    shapes: (params, batch_stats). segments: the trainable ones.
    """
    import jax

    from jaxdp import models
    from jaxdp.parallel.forward_dtypes import forward_dtypes

    params, batch_stats = shapes
    model = models.create(config.model, platform="any")
    dtypes = forward_dtypes(config, model, params=params, batch_stats=batch_stats, devices=1)

    def sizes(names: Sequence[str], *, vectors: bool) -> list[tuple[int, str]]:
        pairs = zip(*(jax.tree.leaves([tree[name] for name in sorted(names)]) for tree in (params, dtypes)), strict=True)
        return [(math.prod(p.shape) * d.itemsize, str(d)) for p, d in pairs if (p.ndim <= 1) == vectors]

    everything, limit = [name for segment in segments for name in segment], config.reduce.bucket_bytes
    groups = [(sizes(everything, vectors=True), assign_buckets(sizes(everything, vectors=True), None))]
    for segment in segments if config.reduce.overlap else [everything]:
        groups.append((sizes(segment, vectors=False), assign_buckets(sizes(segment, vectors=False), limit)))
    return [sum(tensors[index][0] for index in indices) for tensors, buckets in groups for indices in buckets]


def state_bytes(plan: Plan, model_summary: dict[str, Any]) -> dict[str, int]:
    """Bytes on each device of what lasts for a step or longer, in the phase with the shortest rows if the update is sharded."""
    whole = model_summary["state_bytes"]
    parts = min((phase.horizontal for phase in plan.phases if phase.devices > 1), default=1)
    if plan.config.reduce.update != "sharded" or max(phase.devices for phase in plan.phases) == 1:
        return whole
    trained, statistics = whole["gradients"], whole["batch_statistics"]  # gradients: as many bytes as what is trained
    sharded = {
        "parameters": whole["parameters"] - trained + trained // parts,
        "gathered_parameters": sum(model_summary["gathered_messages"]),
        "batch_statistics": statistics,
        "gradients": trained,
        "optimizer": whole["optimizer"] // parts,
    }
    averages = {"averages": trained // parts + whole["averages"] - trained} if "averages" in whole else {}
    return sharded | averages


def _state_bytes(optimizer: Optimizer, shapes: tuple[Any, Any], trainable_shapes: tuple[Any, Any]) -> dict[str, int]:
    """Bytes on each device of what lasts for a step or longer; activations are not included.

    shapes, trainable_shapes: (params, batch_stats) of the whole network and of its trainable part.
    """
    import jax

    from jaxdp.optim import build_optimizer, check_registered

    def size(tree: Any) -> int:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    (params, batch_stats), (trainable, _) = shapes, trainable_shapes
    check_registered(optimizer, trainable)  # before a run begins, as every run prints this
    sizes = {
        "parameters": size(params),
        "batch_statistics": size(batch_stats),
        "gradients": size(trainable),
        "optimizer": size(jax.eval_shape(build_optimizer(optimizer, 0.0, 0.0).init, trainable)),
    }
    weight_of_the_average = jax.ShapeDtypeStruct((), "float32")
    averages = {} if optimizer.average_decay is None else {"averages": size((trainable_shapes, weight_of_the_average))}
    return sizes | averages


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
        "optimizer": dataclasses.asdict(config.optimizer),
        "config": dataclasses.asdict(config),
        "input_bytes": input_bytes(plan),
        "state_bytes": state_bytes(plan, model_summary),
        "strategy": config.reduce.strategy,
        "update": config.reduce.update,
        "wire_dtype": config.reduce.wire_dtype,
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
    rate: images/s of one device, from which the hours follow.
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
    """(label, fact). A label of "" continues the row before."""
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
    training = f"training: {training_labels(config)}"
    rows = [
        ("run", f"{config.name}, seed {config.seed}, {epochs}, {plural(plan.total_steps, 'step', ',')}"),
        ("model", f"{config.model.title}, {config.model.dtype}, {model_summary['parameters']:,} parameters"),
        ("compute", f"{model_summary['macs']:,} multiply-adds an image{f' of {size}x{size}' * (sizes != {size})}"),
        ("data", f"{config.data.source}, {plural(plan.examples, 'image', ',')} of {shown} an epoch"),
        ("input", f"up to {_size(memory['host'])} per host, {_size(memory['device'])} per device for two batches"),
        ("state", f"{_megabytes(sum(state.values()))} MB per device: {parts}"),
        ("devices", devices),
    ]
    if max(phase.devices for phase in plan.phases) > 1:
        statistics = "batch statistics, loss, accuracy" if model_summary["statistics"] else "loss, accuracy"
        rows += [
            ("all-reduce", f"{config.reduce.strategy}, {gradient} of gradients in {config.reduce.wire_dtype}"),
            ("", f"{model_summary['statistics_bytes']:,} bytes of {statistics} and requests in float32"),
        ]
        if config.reduce.update == "sharded":
            gathered = f"{sum(model_summary['gathered_messages']):,} bytes of parameters"
            rows.append(("", f"sharded update: gathers {gathered} in the dtypes of the network, in place of gradients"))
        elif config.reduce.update == "auto":
            rows.append(("", "replicated or sharded update: measured at the start"))
    else:
        rows.append(("all-reduce", f"none on one device, {gradient} of gradients"))
    rows += [
        ("optimizer", _describe_optimizer(optimizer)),
        ("schedule", _describe_schedule(plan)),
        ("loss", "; ".join(filter(None, [LOSSES[optimizer.loss].title, training, f"held-out: {HELD_OUT_LABELS}"]))),
        ("settings", _describe_settings(plan, has_batch_norm=bool(model_summary["statistics"]))),
    ]
    if config.stop.patience is not None:
        rows.append(("early stopping", _describe_stopping(plan, config.stop.patience)))
    if config.finetune != Finetune():
        rows.append(("fine-tuning", _describe_finetuning(config)))
    rows.append(
        (
            "weight decay",
            f"on {decayed['tensors']} tensors with {decayed['parameters']:,} parameters, not on {not_decayed['tensors']} with "
            f"{not_decayed['parameters']:,}",
        )
    )
    for phase in plan.phases:
        idle = f", {phase.idle_devices} idle" if phase.idle_devices else ""
        micro = f" x {phase.accumulation} micro-batches" if phase.accumulation > 1 else ""
        images = f", images of {phase.image_size}x{phase.image_size}"
        rows += [
            (
                f"phase {phase.index}",
                f"epoch {phase.first_epoch:.2f} to {phase.last_epoch:.2f}, {plural(phase.steps, 'step', ',')}, batch "
                f"{phase.global_batch} = {plural(phase.devices, 'device')} ({phase.vertical}x{phase.horizontal}) x "
                f"{phase.per_worker_batch}{micro}{idle}{images if len(sizes) > 1 else ''}",
            ),
            ("", f"learning rate {_rates(plan, phase)}, momentum {phase.momentum:g}"),
        ]
    return rows


def input_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of input images in the largest phase: {"host": prefetched on a host, "device": two batches on each device}."""
    host = device = 0
    for phase in plan.phases:
        data = at_image_size(plan.config, phase.image_size).data
        group = rows_per_chunk(
            phase.per_device_batch, devices=phase.local_devices, image_bytes=data.image_bytes, max_bytes=data.ahead_bytes
        )
        host = max(host, (PREFETCH_DEPTH + 1) * group * phase.local_devices * data.image_bytes)
        device = max(device, 2 * phase.per_device_batch * data.image_bytes)
    return {"host": host, "device": device}


def _describe_optimizer(optimizer: Optimizer) -> str:
    """The optimizer with the fields that its constructor reads, and settings that differ from the defaults.

    Which fields a registered one reads is not known: only those that differ from the defaults.
    """
    words = [f"{optimizer.name}{' with Nesterov momentum' if optimizer.nesterov else ''}"]
    read = {field.removeprefix("optimizer.") for field in OPTIMIZERS.read_fields(optimizer.name)}
    used = sorted({"weight_decay"} | read - {"nesterov"})
    if optimizer.name not in OPTIMIZERS.builtin:
        used = [field for field in used if getattr(optimizer, field) != getattr(Optimizer(), field)]
    words += [f"{field.replace('_', ' ')} {_format(getattr(optimizer, field))}" for field in used]
    if optimizer.velocity_dtype != "float32":
        words.append(f"velocity in {optimizer.velocity_dtype}")
    if optimizer.momentum_rule != "constant":
        rule = _format(optimizer.momentum_rule)
        words.append(f"momentum {optimizer.momentum:g} at batch {optimizer.momentum_batch} with rule {rule!r}")
    if optimizer.clip_norm is not None:
        words.append(f"gradients clipped to norm {optimizer.clip_norm:g}")
    if optimizer.average_decay is not None:
        words.append(f"evaluation of averaged parameters with decay {optimizer.average_decay:g}")
    return ", ".join(words)


def _describe_schedule(plan: Plan) -> str:
    """The schedule with its learning rate, what that is scaled to for each batch, and its warm-up."""
    schedule, batches = plan.config.schedule, {phase.global_batch for phase in plan.phases}
    rate, start = f"learning rate {schedule.learning_rate:g}", ""
    if schedule.name == "goyal" and batches != {GOYAL_BATCH}:
        scaled = (f"{schedule.learning_rate * batch / GOYAL_BATCH:.4g} at batch {batch}" for batch in sorted(batches))
        rate += f" at batch {GOYAL_BATCH}, scaled to {', '.join(scaled)}"
        start = f" from {plan.learning_rate(0):.4g}"
    return f"{schedule.name}, {rate}, {plural(schedule.warmup_epochs, 'epoch', '.3g')} of warm-up{start}"


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


def _format(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value).replace("_", " ")


def _describe_settings(plan: Plan, *, has_batch_norm: bool) -> str:
    """Batch normalization, loss scaling and augmentation."""
    config = plan.config
    model, data, scale = config.model, config.data, config.loss_scale
    words = []
    if has_batch_norm:
        words.append(f"batch norm {model.norm.replace('_', ' ')}, evaluated with {model.statistics.replace('_', ' ')}")
        words += _describe_folding(plan)
    if scale.name != "none":
        words.append(f"{scale.name} loss scale from {scale.initial:g}")
    if model.drop_path:
        words.append(f"drop-path {model.drop_path:g}")
    words.append(f"augmentation {data.augmentation.replace('_', ' ')}")
    if data.stored_size not in (None, data.image_size):
        words[-1] += f" from {data.stored_size}x{data.stored_size}"
    words += _policy_words(config)
    if data.sets_evaluation or data.mean or data.std:
        words.append(evaluation_words(config))
    if data.mix != "none":
        own = "mixup alpha" if data.mix == "mixup_or_cutmix" else "alpha"
        used = [f"{own} {data.mix_alpha:g}"] + [f"cutmix alpha {data.cutmix_alpha:g}"] * (data.mix == "mixup_or_cutmix")
        words.append(f"{data.mix.replace('_', ' ')} ({', '.join(used)})")
    if model.remat:
        words.append("activations recomputed in the backward pass")
    return ", ".join(words)


def _policy_words(config: Config) -> list[str]:
    """The random operations on pixels, and repeated augmentation, in a few words each; empty if all are off."""
    data, ranges = config.data, config.augment
    filters = "bilinear or bicubic, at random" if ranges.crop_interpolation == "random" else ranges.crop_interpolation
    words = [f"crops antialiased ({filters})"] * (filters != "unfiltered")
    if data.auto_augment != "none":
        used = [field.removeprefix("augment.") for field in AUTO_AUGMENTS.read_fields(data.auto_augment)]
        values = {name: getattr(ranges, name) for name in used}
        texts = [f"{name.replace('_', ' ')} {value}" for name, value in values.items() if value not in (None, ())]
        words.append(data.auto_augment.replace("_", " ") + (f" ({', '.join(texts)})" if texts else ""))
    if strengths := ranges.jitter_strengths:
        words.append("color jitter (" + ", ".join(f"{name} {value:g}" for name, value in strengths.items()) + ")")
    if ranges.erase_probability:
        words.append(f"erasing ({ranges.erase_mode}, probability {ranges.erase_probability:g})")
    return words + [f"each image {data.repeats} times a batch"] * (data.repeats > 1)


def _describe_folding(plan: Plan) -> list[str]:
    """["batch norm folded into N convolutions"], or nothing with the separate form."""
    from jaxdp.models.summary import count_folded

    config = plan.config
    if config.model.name != RESNET or config.model.resolved_batch_norm != "folded":
        return []
    counts = {
        count_folded(
            config.model,
            (phase.image_size, phase.image_size, 3),
            batch=phase.per_worker_batch,
            frozen_stages=config.finetune.frozen_stages,
        )
        for phase in plan.phases
    }
    shown = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    return [f"batch norm folded into {shown} convolution{'s' * (counts != {1})}"]


def _describe_stopping(plan: Plan, patience: int) -> str:
    stop, evaluations = plan.config.stop, plan.evaluations_before_end
    delta = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
    waits = f"when {stop.metric} has not improved{delta} for {plural(patience, 'evaluation')} in a row"
    return f"{waits} ({evaluations} before the end); the result is the best checkpoint"


def _describe_finetuning(config: Config) -> str:
    finetune = config.finetune
    frozen = ["the stem"] * (finetune.frozen_stages > 0)
    frozen += [f"{finetune.frozen_stages - 1} stage{'s' * (finetune.frozen_stages > 2)}"] * (finetune.frozen_stages > 1)
    words = [f"from {finetune.weights or 'random weights'}", f"{' and '.join(frozen)} frozen" if frozen else "nothing frozen"]
    words += ["a new classifier"] * finetune.new_head
    if finetune.head_multiplier != 1.0:
        words.append(f"learning rate of the classifier times {finetune.head_multiplier:g}")
    return ", ".join(words)


def _rates(plan: Plan, phase: PlannedPhase) -> str:
    """The first and the last learning rate of a phase, and the highest if it is neither."""
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
