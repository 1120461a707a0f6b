"""Errors of a run that lacks memory, as errors of the configuration."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from jaxdp.errors import ConfigError, TrainingError, first_line
from jaxdp.planning import PlannedPhase
from jaxdp.training.run import Run


@contextmanager
def out_of_memory_as_config_error(run: Run) -> Iterator[None]:
    """Turn an error of JAX or NumPy that a device or the host has no memory left into a ConfigError for the present phase."""
    try:
        yield
    except MemoryError as error:
        raise ConfigError(
            f"batch.{run.phase.index}.global_batch",
            run.phase.global_batch,
            reason=f"the images of a batch do not fit into the memory of this host ({first_line(error, 'no memory left')})",
            hint="use smaller images (data.image_size, data.stored_size), a smaller batch or more hosts",
        ) from None
    except RuntimeError as error:
        if isinstance(error, TrainingError) or not re.search(r"RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE):
            raise
        raise _device_memory_error(run.phase, first_line(error)) from None


def _device_memory_error(phase: PlannedPhase, reason: str) -> ConfigError:
    """Its hint is the largest per-worker batch that keeps the global batch and is at most half the present one."""
    per_device = phase.per_device_batch
    smaller = [size for size in range(1, phase.per_worker_batch // 2 + 1) if per_device % size == 0]
    hint = "it cannot be smaller, so use a smaller model, smaller images or more devices"
    if smaller:
        best = max(smaller)
        hint = (
            f"try --batch.{phase.index}.per-worker-batch {best}, which keeps the global batch {phase.global_batch} by "
            f"accumulating {per_device // best} micro-batches"
        )
    field = f"batch.{phase.index}.per_worker_batch"
    return ConfigError(field, phase.per_worker_batch, reason=f"out of memory ({reason})", hint=hint)
