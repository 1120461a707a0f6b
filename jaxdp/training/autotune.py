"""Choice of the all-reduce strategy: measured once per mesh, stored in the run directory, kept when the run is resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxdp.distributed.process_group import ProcessGroup, SingleProcess
from jaxdp.errors import ConfigError
from jaxdp.files import read_text, write_atomically
from jaxdp.loggers.console import Quiet, Screen
from jaxdp.models import Network
from jaxdp.parallel import timing
from jaxdp.parallel.allreduce import wire_dtype_of
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.strategies import AUTO, STRATEGIES

FILE = "reduce.json"
CHECKED_ELEMENTS = 1001  # not divisible by most numbers of devices


def _default_mesh(phase: PlannedPhase) -> Mesh:
    """A mesh over JAX's first devices."""
    return make_mesh(*phase.shape)


def chosen_strategies(
    plan: Plan,
    model: Network,
    workdir: Path,
    *,
    screen: Screen | Quiet,
    group: ProcessGroup | None = None,
    mesh_of: Callable[[PlannedPhase], Mesh] = _default_mesh,
    before_measuring: Callable[[], None] = lambda: None,
) -> dict[tuple[int, int], str]:
    """Mesh shape -> strategy for all meshes of a plan with strategy "auto"; {} for any other strategy.

    Strategies are read from reduce.json in the run directory; those that are not there are measured with messages of the shapes
    of the gradient, and added to the file. before_measuring: called on all processes before the collectives of a measurement.
    """
    reduce = plan.config.reduce
    if reduce.strategy != AUTO:
        return {}
    group = group or SingleProcess()
    path, size = workdir / FILE, plan.config.data.image_size
    params, _ = jax.eval_shape(lambda: model.init(jax.random.key(0), (size, size, 3)))
    gradient = model.trainable(params, plan.config.finetune.frozen_stages)
    measurements, chosen = group.broadcast_object("strategies known", _read(path)), {}
    sizes = [leaf.size for leaf in jax.tree.leaves(gradient)]
    for shape, phase in {phase.shape: phase for phase in plan.phases}.items():
        key: dict[str, Any] = {"mesh": list(shape), "wire_dtype": reduce.wire_dtype, "bucket_bytes": reduce.bucket_bytes}
        key |= {"tensors": len(sizes), "parameters": sum(sizes)}
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
            )
            measured = key | {"strategy": strategy, "seconds": seconds}
            measurements.append(measured)
            if group.is_rank0:
                write_atomically(path, json.dumps(measurements, indent=1) + "\n")
            times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in sorted(seconds.items(), key=lambda s: s[1]))
            screen.info(f"all-reduce on {shape[0]}x{shape[1]}: {strategy} ({times})")
        else:
            screen.info(f"all-reduce on {shape[0]}x{shape[1]}: {measured['strategy']}, as measured before ({path})")
        chosen[shape] = measured["strategy"]
    return chosen


def check_registered_strategy(
    plan: Plan, mesh_of: Callable[[PlannedPhase], Mesh], before_measuring: Callable[[], None]
) -> None:
    """Raise ConfigError if a registered strategy does not return the sum over all devices, on a short message of integers.

    Built-in strategies have tests. before_measuring: called on all processes before the collectives.
    """
    config, name = plan.config, plan.config.reduce.strategy
    if name == AUTO or STRATEGIES[name].builtin:
        return
    for phase in {phase.shape: phase for phase in plan.phases if phase.devices > 1}.values():
        before_measuring()
        message = jax.ShapeDtypeStruct((CHECKED_ELEMENTS,), "float32")
        reduction = timing.Reduction(mesh_of(phase), message, name, bucket_bytes=None, compile=config.compile)
        if not reduction.is_exact(reduction()):
            shape = f"{phase.vertical}x{phase.horizontal}"
            reason = f"its stages do not return the sum over all devices of the {shape} mesh"
            hint = "correct them; jaxdp.first_gradient(config) must equal that of psum"
            raise ConfigError("reduce.strategy", name, reason=reason, hint=hint)


def _read(path: Path) -> list[dict[str, Any]]:
    """The measurements in a file; [] if it is missing or damaged, so that they are repeated."""
    try:
        rows = json.loads(read_text(path))
    except (OSError, ValueError):
        return []
    rows = rows if isinstance(rows, list) else []
    return [row for row in rows if isinstance(row, dict) and row.get("strategy") in STRATEGIES]
