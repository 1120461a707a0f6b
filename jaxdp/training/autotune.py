"""Choice of the all-reduce strategy and of the placement of the update.

Both are measured once per mesh, stored in the run directory, and kept when the run is resumed.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.config import Reduce
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import ConfigError
from jaxdp.files import read_text, write_atomically
from jaxdp.models import Network
from jaxdp.parallel import allreduce, timing
from jaxdp.parallel.allreduce import wire_dtype_of
from jaxdp.parallel.mesh import AXES, make_mesh
from jaxdp.parallel.shards import own_shard
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.strategies import AUTO, STRATEGIES
from jaxdp.training.update_timing import time_updates, update_candidates

FILE = "reduce.json"
UPDATE_REPEATS = 5
CHECKED_ELEMENTS = 1001  # not divisible by most numbers of devices


def _default_mesh(phase: PlannedPhase) -> Mesh:
    """A mesh over JAX's first devices."""
    return make_mesh(*phase.shape)


def _chosen_strategies(
    plan: Plan,
    model: Network,
    workdir: Path,
    *,
    info: Callable[[str], Any],
    group: ProcessGroup,
    mesh_of: Callable[[PlannedPhase], Mesh],
    before_measuring: Callable[[], None],
) -> dict[tuple[int, int], str]:
    """Mesh shape -> strategy for all meshes of a plan with strategy "auto"; {} for any other strategy."""
    reduce = plan.config.reduce
    if reduce.strategy != AUTO:
        return {}
    path, size = workdir / FILE, plan.config.data.image_size
    params, _ = jax.eval_shape(lambda: model.init(jax.random.key(0), (size, size, 3)))
    gradient = model.trainable(params, plan.config.finetune.frozen_stages)
    measurements, chosen = group.broadcast_object("strategies known", _read(path)), {}
    sizes = [leaf.size for leaf in jax.tree.leaves(gradient)]
    for shape, phase in {phase.shape: phase for phase in plan.phases}.items():
        key: dict[str, Any] = {"mesh": list(shape), "wire_dtype": reduce.wire_dtype, "bucket_bytes": reduce.bucket_bytes}
        key |= {"tensors": len(sizes), "parameters": sum(sizes)}
        key |= {"update": "sharded"} if reduce.update == "sharded" else {}
        matching = (row for row in measurements if all(row.get(name) == value for name, value in key.items()))
        measured = next(matching, None)
        if measured is None:
            before_measuring()
            strategy, seconds = timing.fastest_strategy(
                mesh_of(phase),
                gradient,
                wire_dtype=wire_dtype_of(reduce),
                bucket_bytes=reduce.bucket_bytes,
                compile=plan.config.compile,
                scatters=reduce.update == "sharded",
            )
            measured = key | {"strategy": strategy, "seconds": seconds}
            measurements.append(measured)
            if group.is_rank0:
                write_atomically(path, json.dumps(measurements, indent=1) + "\n")
            times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in sorted(seconds.items(), key=lambda s: s[1]))
            info(f"all-reduce on {shape[0]}x{shape[1]}: {strategy} ({times})")
        else:
            info(f"all-reduce on {shape[0]}x{shape[1]}: {measured['strategy']}, as measured before ({path})")
        chosen[shape] = measured["strategy"]
    return chosen


def chosen_reductions(
    plan: Plan,
    model: Network,
    workdir: Path,
    *,
    info: Callable[[str], Any],
    group: ProcessGroup | None = None,
    mesh_of: Callable[[PlannedPhase], Mesh] = _default_mesh,
    before_measuring: Callable[[], None] = lambda: None,
) -> dict[tuple[int, int], Reduce]:
    """Mesh shape -> `Reduce` with a strategy and a placement of the update in place of "auto"; {} if there is no "auto".

    Choices are read from reduce.json in the run directory; those that are not there are measured with messages of the shapes
    of the gradient, and added to the file. before_measuring: called on all processes before the collectives of a measurement.
    """
    reduce = plan.config.reduce
    if AUTO not in (reduce.strategy, reduce.update):
        return {}
    options: dict[str, Any] = {"info": info, "group": group or ProcessGroup(), "mesh_of": mesh_of}
    options["before_measuring"] = before_measuring
    strategies = _chosen_strategies(plan, model, workdir, **options)
    chosen = {}
    for phase in {phase.shape: phase for phase in plan.phases}.values():
        fixed = dataclasses.replace(reduce, strategy=strategies.get(phase.shape, reduce.strategy))
        chosen[phase.shape] = fixed
        if reduce.update == AUTO:
            chosen[phase.shape] = _chosen_update(plan, model, workdir, phase=phase, reduce=fixed, **options)
    return chosen


def _chosen_update(
    plan: Plan,
    model: Network,
    workdir: Path,
    *,
    phase: PlannedPhase,
    reduce: Reduce,
    info: Callable[[str], Any],
    group: ProcessGroup,
    mesh_of: Callable[[PlannedPhase], Mesh],
    before_measuring: Callable[[], None],
) -> Reduce:
    """The faster of: reduction by the strategy of `reduce` with a replicated update; the same by a strategy that scatters, with
    a sharded one. If that was chosen automatically it may be another strategy."""
    config = plan.config
    candidates = update_candidates(config, reduce, phase.shape)
    if len(candidates) == 1:
        return candidates["replicated"]
    path = workdir / FILE
    key: dict[str, Any] = {"mesh": list(phase.shape), "reduce": dataclasses.asdict(reduce)}
    key |= {"optimizer": dataclasses.asdict(config.optimizer), "model": dataclasses.asdict(config.model)}
    key |= {"frozen_stages": config.finetune.frozen_stages, "compile": dataclasses.asdict(config.compile)}
    rows = group.broadcast_object("updates known", _read(path))
    measured = next((row for row in rows if all(row.get(name) == value for name, value in key.items())), None)
    shape = f"{phase.vertical}x{phase.horizontal}"
    if measured is None or measured.get("update") not in candidates:
        before_measuring()
        seconds = time_updates(config, model, mesh_of(phase), candidates=candidates, repeats=UPDATE_REPEATS)
        measured = key | {"strategy": reduce.strategy, "update": min(seconds, key=seconds.__getitem__), "seconds": seconds}
        if group.is_rank0:
            write_atomically(path, json.dumps([*rows, measured], indent=1) + "\n")
        times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in sorted(seconds.items(), key=lambda s: s[1]))
        info(f"reduction and update on {shape}: {measured['update']} ({times})")
    else:
        info(f"reduction and update on {shape}: {measured['update']}, as measured before ({path})")
    return candidates[measured["update"]]


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
