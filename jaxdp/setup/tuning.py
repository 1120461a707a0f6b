"""Choice of the all-reduce strategy and of the placement of the update, and checks of registered strategies.

Choices are measured once per mesh, stored in the run directory, and kept when the run is resumed.
"""

import dataclasses
import json
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.config import Config, Reduce
from jaxdp.distributed.preemption import SignalHandler
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.errors import ConfigError
from jaxdp.files import read_text, write_atomically
from jaxdp.network import Network
from jaxdp.optim.checks import check_elementwise
from jaxdp.optim.squares import norm
from jaxdp.parallel import allreduce, timing
from jaxdp.parallel.allreduce import wire_dtype_of
from jaxdp.parallel.mesh import AXES
from jaxdp.parallel.shards import own_shard
from jaxdp.planning import Plan, PlannedPhase
from jaxdp.relations import replicated_reason
from jaxdp.strategies import AUTO, STRATEGIES
from jaxdp.training.state import TrainState, create_state, make_optimizer, make_placement
from jaxdp.training.step_compiler import mesh_of
from jaxdp.xla import options

FILE = "reduce.json"
UPDATE_REPEATS = 5
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
    if any(each.update == "sharded" for each in (plan.config.reduce, *reductions.values())):
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
    """Mesh shape -> `Reduce` with a strategy and a placement of the update in place of "auto"; {} if there is no "auto".

    Choices are read from reduce.json in the run directory; those that are not there are measured with messages of the shapes
    of the gradient, and added to the file. before_measuring: called on all processes before the collectives of a measurement.
    """
    reduce = plan.config.reduce
    if AUTO not in (reduce.strategy, reduce.update):
        return {}
    choices, chosen = _Choices(workdir / FILE, group or ProcessGroup(), info=info, before_measuring=before_measuring), {}
    for phase in {phase.shape: phase for phase in plan.phases}.values():
        chosen[phase.shape] = reduce
        if reduce.strategy == AUTO:
            chosen[phase.shape] = _with_fastest_strategy(plan, model, phase, choices=choices, mesh=mesh_of(phase))
        if reduce.update == AUTO:
            found = _with_fastest_update(plan, model, phase, fixed=chosen[phase.shape], choices=choices, mesh=mesh_of(phase))
            chosen[phase.shape] = found
    return chosen


def _with_fastest_strategy(plan: Plan, model: Network, phase: PlannedPhase, *, choices: "_Choices", mesh: Mesh) -> Reduce:
    """The reduction of a plan with the strategy that is fastest on a mesh."""
    config, reduce, size = plan.config, plan.config.reduce, plan.config.data.image_size
    params, _ = jax.eval_shape(lambda: model.init(jax.random.key(0), (size, size, 3)))
    gradient = model.trainable(params, config.finetune.frozen_stages)
    sizes, scatters = [leaf.size for leaf in jax.tree.leaves(gradient)], reduce.update == "sharded"
    key: dict[str, Any] = {"mesh": list(phase.shape), "wire_dtype": reduce.wire_dtype, "bucket_bytes": reduce.bucket_bytes}
    key |= {"tensors": len(sizes), "parameters": sum(sizes)} | ({"update": "sharded"} if scatters else {})

    def measure() -> tuple[str, dict[str, float]]:
        return timing.fastest_strategy(
            mesh,
            gradient,
            wire_dtype=wire_dtype_of(reduce),
            bucket_bytes=reduce.bucket_bytes,
            compile=config.compile,
            scatters=scatters,
        )

    strategy = choices.choose(f"all-reduce on {phase.vertical}x{phase.horizontal}", key, "strategy", measure=measure)
    return dataclasses.replace(reduce, strategy=strategy)


def _with_fastest_update(
    plan: Plan, model: Network, phase: PlannedPhase, *, fixed: Reduce, choices: "_Choices", mesh: Mesh
) -> Reduce:
    """The faster of: reduction by the strategy of `fixed` with a replicated update; the same by a strategy that scatters, with
    a sharded one. If that was chosen automatically it may be another strategy."""
    config = plan.config
    candidates = update_candidates(config, fixed, phase.shape)
    if len(candidates) == 1:
        return candidates["replicated"]
    key: dict[str, Any] = {"mesh": list(phase.shape), "reduce": dataclasses.asdict(fixed), "strategy": fixed.strategy}
    key |= {"optimizer": dataclasses.asdict(config.optimizer), "model": dataclasses.asdict(config.model)}
    key |= {"frozen_stages": config.finetune.frozen_stages, "compile": dataclasses.asdict(config.compile)}

    def measure() -> tuple[str, dict[str, float]]:
        seconds = time_updates(config, model, mesh, candidates=candidates, repeats=UPDATE_REPEATS)
        return min(seconds, key=seconds.__getitem__), seconds

    label = f"reduction and update on {phase.vertical}x{phase.horizontal}"
    return candidates[choices.choose(label, key, "update", measure=measure, among=candidates)]


class _Choices:
    """The file of choices in a run directory. before_measuring: called on all processes before a measurement."""

    def __init__(
        self, path: Path, group: ProcessGroup, *, info: Callable[[str], Any], before_measuring: Callable[[], None]
    ) -> None:
        self.path, self.group, self.info, self.before_measuring = path, group, info, before_measuring
        self.rows: list[dict[str, Any]] = group.broadcast_object("choices known", _read(path))

    def choose(
        self,
        label: str,
        key: dict[str, Any],
        field: str,
        *,
        measure: Callable[[], tuple[str, dict[str, float]]],
        among: Container[str] = STRATEGIES,
    ) -> str:
        """The choice among `among` that was measured before under this key; else `measure` it and add it to the file.

        label: what it is of, in messages. field: its name in the file. measure: returns it, and seconds by candidate.
        """
        key = json.loads(json.dumps(key))  # as the file has it: with lists for tuples
        for row in self.rows:
            if row.get(field) in among and all(row.get(name) == value for name, value in key.items()):
                self.info(f"{label}: {row[field]}, as measured before ({self.path})")
                return row[field]
        self.before_measuring()
        choice, seconds = measure()
        self.rows.append(key | {field: choice, "seconds": seconds})
        if self.group.is_rank0:
            write_atomically(self.path, json.dumps(self.rows, indent=1) + "\n")
        times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in sorted(seconds.items(), key=lambda s: s[1]))
        self.info(f"{label}: {choice} ({times})")
        return choice


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


def update_candidates(config: Config, reduce: Reduce, mesh_shape: tuple[int, int]) -> dict[str, Reduce]:
    """The forms of the update that a mesh can have, by name: replicated with the strategy of `reduce`, and sharded.

    The sharded form may have another strategy if that of the config is "auto".
    """
    vertical, horizontal = mesh_shape
    found = {"replicated": dataclasses.replace(reduce, update="replicated")}
    scattering = timing.auto_candidates(vertical * horizontal, scatters=True)
    for name in scattering if config.reduce.strategy == AUTO else [reduce.strategy]:
        sharded = dataclasses.replace(reduce, strategy=name, update="sharded")
        if horizontal > 1 and replicated_reason(dataclasses.replace(config, reduce=sharded)) is None:
            found[f"{name}, sharded"] = sharded
    return found


def time_updates(
    config: Config, model: Network, mesh: Mesh, *, candidates: dict[str, Reduce], repeats: int
) -> dict[str, float]:
    """Median seconds of reduction and update in each form, measured alternately; equal on all processes."""
    calls: dict[str, Callable[[], Any]] = {
        name: _compile_update(dataclasses.replace(config, reduce=reduce), model, mesh) for name, reduce in candidates.items()
    }
    return timing.agreed_medians(timing.time_alternately(calls, repeats))


def _compile_update(config: Config, model: Network, mesh: Mesh) -> Callable[[], Any]:
    """A compiled function of no arguments that reduces a gradient, updates the state, and gathers the parameters."""
    placement = make_placement(config, model, mesh)
    gather_params, reduce = placement.params_gatherer(), config.reduce

    def trainable(tree: dict) -> dict:
        return model.trainable(tree, config.finetune.frozen_stages)

    def update(state: TrainState) -> tuple[Any, Any, jax.Array]:
        params = gather_params(state.params)
        # As in a step, the gradient follows from the gathered parameters and differs between devices.
        device = lax.axis_index(AXES).astype(jnp.float32)
        gradient = jax.tree.map(lambda p: p * (1e-3 + 1e-6 * device), lax.pcast(trainable(params), AXES, to="varying"))
        gradient = allreduce.all_reduce_sum(
            gradient,
            reduce.strategy,
            wire_dtype=allreduce.wire_dtype_of(reduce),
            bucket_bytes=reduce.bucket_bytes,
            sharded=placement.sharded,
        )
        shards = trainable(state.params)
        squares = placement.squares(gradient, shards)
        optimizer = make_optimizer(config, model, learning_rate=1e-3, momentum=0.9)
        updates, opt_state = optimizer.update(gradient, state.opt_state, shards, squares=squares)
        return optax.apply_updates(shards, updates), opt_state, norm(squares.gradient)  # the step logs the norm

    specs = placement.specs
    if placement.sharded:
        specs_out: Any = (trainable(specs.params), specs.opt_state, PartitionSpec())
    else:
        specs_out = PartitionSpec()
    check_vma = allreduce.check_vma(reduce.strategy)
    mapped = jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=specs_out, check_vma=check_vma)
    state = placement.place(create_state(config, model, mesh))
    compiled = jax.jit(mapped).lower(state).compile(options.compiler_options(config.compile, mesh.devices.flat[0].platform))
    return lambda: compiled(state)
