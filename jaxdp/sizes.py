"""Sizes of a planned run: parameters, and bytes of the state, of its messages and of its input."""

import math
from collections.abc import Sequence
from typing import Any

from jaxdp.choices import OPTIMIZERS
from jaxdp.config import Config, Optimizer, at_image_size, divides_by_class_weights, phase_image_size
from jaxdp.data.prefetch import PREFETCH_DEPTH, image_bytes, rows_per_chunk
from jaxdp.metrics import METRICS
from jaxdp.parallel.buckets import WIRE_BYTES, assign_buckets
from jaxdp.planning import Plan
from jaxdp.targets import target_of


def model_summary(config: Config) -> dict[str, Any]:
    """Sizes of the network, from a trace: parameters, multiply-adds of one image, bytes of the state on each device, and bytes
    per step and message of the gradient and, in float32, of the batch statistics with loss, metric and requests. With
    `finetune.unfreeze_epoch` they are those after unfreezing.

    messages: of gradients, then statistics_messages. gathered_messages: bytes of the parameters that a sharded update gathers,
    by message. norms_messages: of its messages of sums of squares.
    """
    import jax

    from jaxdp.models import create
    from jaxdp.models.summary import check_image_size, summary
    from jaxdp.optim.checks import check_loss
    from jaxdp.optim.groups import check_groups, decayed_counts
    from jaxdp.registration import check_augmentation
    from jaxdp.tasks.checks import check_outputs

    check_loss(config.optimizer, config.model.class_count)  # before a run begins, as every run prints this
    check_augmentation(config)
    size = config.data.image_size
    check_image_size(config.model, config.data.evaluated_size, trained=size, field="data.eval_size")
    for index in range(len(config.batch)):
        check_image_size(config.model, phase_image_size(config, index), trained=size, field=f"batch.{index}.image_size")
    counted = summary(config.model, (size, size, 3), config.finetune.always_frozen)
    check_outputs(config, counted["outputs"])
    model, trainable = create(config.model, platform="any"), counted["trainable_shapes"][0]
    check_groups(config, model, counted["shapes"][0])
    counted["target_bytes"] = target_of(config).dtype.itemsize
    counted["output_bytes"] = sum(4 * math.prod(part.shape) for part in jax.tree.leaves(counted.pop("outputs")))
    if config.optimizer.adapt == "all" or config.optimizer.groups:
        counted |= decayed_counts(config, model, trainable)
    width = WIRE_BYTES[config.reduce.wire_dtype]
    sizes, segments = counted.pop("sizes"), counted.pop("segments")
    messages = []
    trained = counted["decayed"]["parameters"] + counted["not_decayed"]["parameters"]
    for segment in segments if config.reduce.overlap else [sizes]:  # a bucket holds tensors of one segment only
        tensors = [(size * width, "gradient") for name in sorted(segment) for size in sizes[name]]
        buckets = assign_buckets(tensors, config.reduce.bucket_bytes)
        messages += [sum(tensors[index][0] for index in indices) for indices in buckets]
    scalars = len(("loss", "request to save", "request to stop")) + (METRICS[config.first_metric].of == "images")
    statistics = [4] * divides_by_class_weights(config) + [4 * (counted["statistics"] + scalars)]
    gathered = _gathered_messages(config, counted["shapes"], segments) if config.reduce.update == "sharded" else []
    return counted | {
        "state_bytes": _state_bytes(config.optimizer, counted.pop("shapes"), counted.pop("trainable_shapes")),
        "gradient_bytes": trained * width,
        "statistics_bytes": sum(statistics),
        "statistics_messages": statistics,
        "messages": messages + statistics,
        "gathered_messages": gathered,
        "norms_messages": _norms_messages(config.optimizer, counted["decayed"]["tensors"] + counted["not_decayed"]["tensors"]),
    }


def _norms_messages(optimizer: Optimizer, tensors: int) -> list[int]:
    rule = OPTIMIZERS[optimizer.name]
    first = 4 * tensors * (1 + rule.uses_weight_norms)
    return [first, 4 * tensors] if rule.uses_update_norms else [first]


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

    from jaxdp.optim import build_optimizer
    from jaxdp.optim.checks import check_optimizer

    def size(tree: Any) -> int:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    (params, batch_stats), (trainable, _) = shapes, trainable_shapes
    check_optimizer(optimizer, trainable)  # before a run begins, as every run prints this
    sizes = {
        "parameters": size(params),
        "batch_statistics": size(batch_stats),
        "gradients": size(trainable),
        "optimizer": size(jax.eval_shape(build_optimizer(optimizer, 0.0, 0.0).init, trainable)),
    }
    steps_of_the_average = jax.ShapeDtypeStruct((), "float32")
    averages = {} if optimizer.average_decay is None else {"averages": size((trainable_shapes, steps_of_the_average))}
    return sizes | averages


def input_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of input images in the largest phase: {"host": prefetched on a host, "device": two batches on each device}."""
    host = device = 0
    for phase in plan.phases:
        data = at_image_size(plan.config, phase.image_size).data
        group = rows_per_chunk(phase.per_device_batch, devices=phase.local_devices, image_bytes=image_bytes(data))
        host = max(host, (PREFETCH_DEPTH + 1) * group * phase.local_devices * image_bytes(data))
        device = max(device, 2 * phase.per_device_batch * image_bytes(data))
    return {"host": host, "device": device}
