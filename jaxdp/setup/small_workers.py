"""Warning of workers with few images, whose batch normalization is noisy."""

from jaxdp.errors import plural
from jaxdp.planning import FEW_VALUES, Plan


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
    return "\n".join(lines) or None
