"""The fewest values over which batch normalization averages in a phase of a plan, from a trace of the network."""

import contextlib
import math
from dataclasses import replace
from typing import Any

from jaxdp.config import Config
from jaxdp.errors import ConfigError
from jaxdp.models.summary import count_normalized

Phase = Any  # a `jaxdp.planning.PlannedPhase`, whose module is above this one


def fewest_values(config: Config, phase: Phase) -> float:
    """The fewest values of a channel; infinity without batch normalization. Raises ConfigError for a layer with only one."""
    layer, values = _fewest(config, phase)
    if values == 1:
        raise _one_value(config, phase, layer)
    return values


def _fewest(config: Config, phase: Phase) -> tuple[str, float]:
    """The layer of batch normalization that averages over the fewest values of a channel in a phase, and their number.

    ("", infinity) without such layers, and if a registered model cannot be traced, which `model_summary` reports.
    """
    nothing, batch = ("", math.inf), phase.per_worker_batch
    model = replace(config.model, classes=config.model.classes or 2)
    frozen = config.finetune.frozen_stages
    with contextlib.suppress(ConfigError):
        counts = count_normalized(model, phase.image_size, batch=batch, mesh=phase.shape, frozen_stages=frozen)
        return min(counts.items(), key=lambda count: count[1], default=nothing)
    return nothing


def _one_value(config: Config, phase: Phase, layer: str) -> ConfigError:
    """The error for a phase in which a layer normalizes single values, with the smallest batch that works."""
    flag, size = f"--batch.{phase.index}.", phase.image_size
    larger = f"{flag}per-worker-batch 2"
    if phase.accumulation % 2:
        larger = f"{flag}global-batch {2 * phase.global_batch} {larger}"
    hints = [larger]
    if phase.devices > 1 and config.model.norm == "per_worker":
        hints.append("--model.norm synchronized")
    field, batch = f"batch.{phase.index}.per_worker_batch", phase.per_worker_batch
    reason = f"{layer} has one value of each channel with images of {size}x{size}, and batch normalization needs two"
    return ConfigError(field, batch, reason=reason, hint=f"use {', or '.join(hints)}")
