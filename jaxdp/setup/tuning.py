"""Choice of the all-reduce strategy, and checks of registered strategies.

Choices are measured once per mesh, stored in the run directory, and kept when the run is resumed.
"""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp import models
from jaxdp.config import Reduce
from jaxdp.distributed.preemption import SignalHandler
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import ConfigError
from jaxdp.files import read_text, write_atomically
from jaxdp.network import Network
from jaxdp.optim.checks import check_elementwise
from jaxdp.parallel import allreduce, timing
from jaxdp.parallel.allreduce import wire_dtype_of
from jaxdp.parallel.mesh import AXES
from jaxdp.parallel.shards import own_shard
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.strategies import AUTO, STRATEGIES
from jaxdp.training.step_compiler import mesh_of

FILE = "reduce.json"
CHECKED_ELEMENTS = 1001  # not divisible by most numbers of devices


def reductions_of_run(
    plan: Plan, model: Network, workdir: Path, *, devices: list[jax.Device], signals: SignalHandler, info: Callable[[str], Any]
) -> dict[tuple[int, int], Reduce]:
    """`chosen_reductions` of a run, checked: a registered strategy must add up, a sharded update needs a suitable optimizer."""
    mesh_on_devices, before_measuring = partial(mesh_of, devices=devices), signals.raise_if_stop_agreed
    group = signals.group
    group.set_activity("compile", detail="choosing the all-reduce strategy")
    reductions = chosen_reductions(
        plan, model, workdir, info=info, group=group, mesh_of=mesh_on_devices, before_measuring=before_measuring
    )
    check_registered_strategy(plan, mesh_on_devices, before_measuring)
    if plan.config.reduce.update == "sharded":
        check_elementwise(plan.config.optimizer)
    return reductions


def chosen_reductions(
    plan: Plan,
    model: Network,
    workdir: Path,
    *,
    info: Callable[[str], Any],
    group: ProcessGroup | None = None,
    mesh_of: Callable[[PlannedPhase], Mesh] = mesh_of,
    before_measuring: Callable[[], None] = lambda: None,
) -> dict[tuple[int, int], Reduce]:
    """Mesh shape -> `Reduce` with the fastest strategy in place of "auto"; {} if there is no "auto".

    Choices are read from reduce.json in the run directory; those that are not there are measured with messages of the shapes
    of the gradient, and added to the file. before_measuring: called on all processes before the collectives of a measurement.
    """
    config, reduce = plan.config, plan.config.reduce
    if reduce.strategy != AUTO:
        return {}
    path, group, size = workdir / FILE, group or ProcessGroup(), config.data.image_size
    rows: list[dict[str, Any]] = group.broadcast_object("choices known", _read(path))
    params, _ = models.initial_shapes(model, (size, size, 3))
    gradient = model.trainable(params, config.finetune.frozen_stages)
    sizes = [leaf.size for leaf in jax.tree.leaves(gradient)]
    message = {"wire_dtype": reduce.wire_dtype, "bucket_bytes": reduce.bucket_bytes}
    message |= {"tensors": len(sizes), "parameters": sum(sizes)} | ({"update": "sharded"} if reduce.update == "sharded" else {})
    chosen = {}
    for phase in {phase.shape: phase for phase in plan.phases}.values():
        key, label = {"mesh": list(phase.shape)} | message, f"all-reduce on {phase.vertical}x{phase.horizontal}"
        known = next((row["strategy"] for row in rows if all(row.get(name) == value for name, value in key.items())), None)
        if known is not None:
            info(f"{label}: {known}, as measured before ({path})")
        else:
            before_measuring()
            known, seconds = timing.fastest_strategy(
                mesh_of(phase),
                gradient,
                wire_dtype=wire_dtype_of(reduce),
                bucket_bytes=reduce.bucket_bytes,
                compile=config.compile,
                scatters=reduce.update == "sharded",
            )
            rows.append(key | {"strategy": known, "seconds": seconds})
            if group.is_rank0:
                write_atomically(path, json.dumps(rows, indent=1) + "\n")
            times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in sorted(seconds.items(), key=lambda s: s[1]))
            info(f"{label}: {known} ({times})")
        chosen[phase.shape] = dataclasses.replace(reduce, strategy=known)
    return chosen


def check_registered_strategy(
    plan: Plan, mesh_of: Callable[[PlannedPhase], Mesh], before_measuring: Callable[[], None]
) -> None:
    """Raise ConfigError if a registered strategy does not return the sum over all devices, or does not scatter as declared.

    It is run on a short message of integers.

    Built-in strategies have tests. before_measuring: called on all processes before the collectives.
    """
    config, name = plan.config, plan.config.reduce.strategy
    if name not in STRATEGIES.registered:
        return
    for phase in {phase.shape: phase for phase in plan.phases if phase.devices > 1}.values():
        before_measuring()
        message = jax.ShapeDtypeStruct((CHECKED_ELEMENTS,), "float32")
        reduction = timing.Reduction(mesh_of(phase), message, name, bucket_bytes=None, compile=config.compile)
        shape = f"{phase.vertical}x{phase.horizontal}"
        if not reduction.is_exact(reduction()):
            reason = f"its stages do not return the sum over all devices of the {shape} mesh"
            hint = "correct them; jaxdp.first_gradient(config) must equal that of psum"
            raise ConfigError("reduce.strategy", name, reason=reason, hint=hint)
        if STRATEGIES[name].scatters and not _leaves_shards(name, mesh_of(phase)):
            reason = f"before its last stage, the devices of a row of the {shape} mesh do not hold the sum's shards in order"
            raise ConfigError("reduce.strategy", name, reason=reason, hint="correct its stages, or register without scatters")


def _leaves_shards(strategy: str, mesh: Mesh) -> bool:
    """Whether each device of this process has its shard of a sum of integers before the last stage of a strategy."""

    def per_device(row: jax.Array) -> jax.Array:
        values = jnp.arange(CHECKED_ELEMENTS, dtype=jnp.float32) % 64
        shard = allreduce.all_reduce_sum(values + row, strategy, bucket_bytes=None, sharded=True)
        devices = mesh.size
        return jnp.all(shard == own_shard(devices * values + devices * (devices - 1) / 2))[None]

    rows = PartitionSpec(AXES)
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    numbers = jax.jit(lambda: jnp.arange(mesh.size, dtype=jnp.float32), out_shardings=NamedSharding(mesh, rows))()
    return all(bool(shard.data.all()) for shard in jax.jit(mapped)(numbers).addressable_shards)


def _read(path: Path) -> list[dict[str, Any]]:
    """The measurements in a file; [] if it is missing or damaged, so that they are repeated."""
    try:
        rows = json.loads(read_text(path))
    except (OSError, ValueError):
        return []
    rows = rows if isinstance(rows, list) else []
    return [row for row in rows if isinstance(row, dict) and row.get("strategy") in STRATEGIES]
