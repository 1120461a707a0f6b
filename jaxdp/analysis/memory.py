"""Memory of a planned run on each device, estimated without compiling, and whether a GPU can hold it."""

import dataclasses
import math
import os
from typing import Any

from jaxdp.errors import one_of, plural
from jaxdp.models.activation_memory import activation_bytes
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.sizes import input_bytes, state_bytes

GIB = 2**30
GPU_MEMORY = {
    "t4": 16,
    "v100-16gb": 16,
    "v100-32gb": 32,
    "rtx3090": 24,
    "rtx4090": 24,
    "rtx5090": 32,
    "a10": 24,
    "l4": 24,
    "l40s": 48,
    "a100-40gb": 40,
    "a100": 80,
    "h100": 80,
    "h200": 141,
    "b200": 180,
}  # GB as sold, which the vendors count in units of 2^30 bytes or slightly less
FRACTION, FRACTION_VARIABLE = 0.75, "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX's default


def usable_bytes(gpu: str) -> int:
    """Bytes of a GPU's memory that JAX uses. gpu: a key of `GPU_MEMORY`. Raises ConfigError for another one."""
    if gpu not in GPU_MEMORY:
        raise one_of("--gpu", gpu, GPU_MEMORY)
    return int(_fraction() * GPU_MEMORY[gpu] * GIB)


def _fraction() -> float:
    try:
        return float(os.environ.get(FRACTION_VARIABLE) or FRACTION)
    except ValueError:
        return FRACTION


def estimate(plan: Plan, model_summary: dict[str, Any]) -> dict[str, int]:
    """Bytes on each device in the phase that needs most: state, input, activations, activations_per_image and total.

    The activations are of one micro-batch. Temporaries of single operations are not included.
    """
    phase, per_image = _largest(plan)
    state = state_bytes(plan, model_summary)
    needed = sum(state.values())
    if any(phase.accumulation > 1 for phase in plan.phases):
        needed += state["gradients"]  # the sum over micro-batches
    parts = {
        "state": needed,
        "input": input_bytes(plan)["device"],
        "activations": per_image * phase.per_worker_batch,
    }
    return parts | {"activations_per_image": per_image, "total": sum(parts.values())}


def _largest(plan: Plan) -> tuple[PlannedPhase, int]:
    """(phase with the most bytes of activations, bytes for one of its images)."""
    per_image = {size: _activation_bytes(plan, size) for size in {phase.image_size for phase in plan.phases}}
    phase = max(plan.phases, key=lambda phase: phase.per_worker_batch * per_image[phase.image_size])
    return phase, per_image[phase.image_size]


def _activation_bytes(plan: Plan, size: int, **changes: Any) -> int:
    """Bytes of the activations of one image of height and width `size`. changes: fields of the model."""
    model = dataclasses.replace(plan.config.model, **changes)
    return activation_bytes(model, (size, size, 3), plan.config.finetune.always_frozen)


def describe(plan: Plan, memory: dict[str, int]) -> str:
    """The estimate in one line."""
    images = _largest(plan)[0].per_worker_batch
    scale, unit, digits = (1e9, "GB", 2) if memory["total"] >= 1e9 else (1e6, "MB", 1)
    sizes = (memory[part] / scale for part in ("total", "state", "input", "activations"))
    total, state, inputs, activations = (f"{size:,.{digits}f}" for size in sizes)
    if any(phase.accumulation > 1 for phase in plan.phases):
        state += " with the sum of the micro-batches' gradients"
    return (
        f"about {total} {unit} per device: state {state}, input {inputs}, activations {activations} "
        f"({plural(images, 'image')} x {memory['activations_per_image'] / 1e6:,.1f} MB)"
    )


def warning(plan: Plan, memory: dict[str, int], *, limit: int, device: str) -> str | None:
    """One line if the estimate exceeds `limit` bytes, with what would fit on the same devices; else None. device: its name."""
    if memory["total"] <= limit:
        return None
    largest, _ = _largest(plan)
    room, model = limit - memory["state"] - memory["input"], plan.config.model
    smaller = [n for n in range(1, largest.per_worker_batch) if largest.global_batch % (n * largest.devices) == 0]
    batch = max((n for n in smaller if n * memory["activations_per_image"] <= room), default=0)
    hints = [f"--batch.{largest.index}.per-worker-batch {batch}"] if batch else []
    changes: dict[str, dict[str, Any]] = {
        "--model.dtype bfloat16": {"dtype": "bfloat16"},
        "--model.remat": {"remat": True},
        "--model.dtype bfloat16 --model.remat": {"dtype": "bfloat16", "remat": True},
    }
    for flags, changed in changes.items():
        per_image = _activation_bytes(plan, largest.image_size, **changed)
        if dataclasses.replace(model, **changed) != model and largest.per_worker_batch * per_image <= room:
            hints.append(flags)
    share = "" if math.isclose(_fraction(), 1) else f" ({_fraction():.0%} of its memory; {FRACTION_VARIABLE} sets the share)"
    advice = f"; use {' or '.join(hints[:3])}" if hints else "; use more devices or a larger GPU"
    return (
        f"warning: {device} cannot hold this run: it needs about {memory['total'] / 1e9:,.1f} GB, and JAX uses "
        f"{limit / 1e9:,.1f} GB{share}{advice}"
    )
