"""Audits: at some steps, the gradients are reduced by the step's strategy and by a reference, and the sums are compared.

The program of an audit takes the arguments of the next step, computes and reduces the same gradients, and discards them. So
audits do not change the step. `jaxdp.parallel.redundant_sum` compares the sums.
"""

import math
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdp.checkpoint.manager import Rollback
from jaxdp.distributed import status
from jaxdp.errors import TrainingError
from jaxdp.parallel import allreduce
from jaxdp.parallel.buckets import shard_size
from jaxdp.parallel.mesh import AXES
from jaxdp.parallel.redundant_sum import compare_sums, reference_reduction, rounding_bound
from jaxdp.planning import PlannedPhase
from jaxdp.training.callback import Callback
from jaxdp.training.loop import complete_steps
from jaxdp.training.objective import Batch
from jaxdp.training.run import Run, add_to_record
from jaxdp.training.state import TrainState
from jaxdp.training.step import make_layout, step_gradient
from jaxdp.training.step_compiler import StepCompiler

MAX_NAMED_DEVICES = 4


class AuditFailed(TrainingError):
    """Two sums of the same numbers differ by more than rounding. The message says how to continue."""

    says_how_to_continue = True


@dataclass(frozen=True)
class BucketFacts:
    """Contents of one bucket of a step.

    tensors: (name, number of values in a part), in the order of the bucket. parts: the bucket holds the first parts of all
    tensors, then the second ones, and so on.
    """

    tensors: tuple[tuple[str, int], ...]
    dtype: str
    parts: int = 1

    @property
    def size(self) -> int:
        return self.parts * sum(size for _, size in self.tensors)

    def tensor_at(self, place: int) -> str:
        """The name of the tensor that holds the value at an index of the bucket."""
        place %= self.size // self.parts
        for name, size in self.tensors:
            if place < size:
                return name
            place -= size
        raise IndexError(place)


@dataclass(frozen=True)
class AuditProgram:
    """A compiled audit. facts: of the compared buckets, in the order of its results. reference: see `reference_reduction`."""

    compiled: Callable
    facts: tuple[BucketFacts, ...]
    strategy: str
    reference: str
    mesh_shape: tuple[int, int]

    @status.current().waiting(status.DEVICES)
    def __call__(self, state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array]) -> dict[str, Any]:
        """The findings of this process's devices: see `local_findings`."""
        return local_findings(self.compiled(state, batch, hyperparameters))


def compile_audit(compiler: StepCompiler, phase: PlannedPhase) -> AuditProgram:
    """The audit of a phase, which takes the arguments of its step.

    It returns what `jaxdp.parallel.redundant_sum.compare_sums` finds for each bucket on each device: arrays [devices, buckets].
    """
    config, (vertical, horizontal) = phase.config_of(compiler.plan.config), phase.shape
    strategy = config.reduce.strategy
    reference = reference_reduction(strategy, vertical, horizontal)
    layout = make_layout(config, compiler.model, compiler.mesh(phase))
    gradients = step_gradient(config, layout, pixel_stats=compiler.pixel_stats, accumulation=phase.accumulation)
    parts = horizontal if layout.sharded else 1
    facts: list[BucketFacts] = []  # filled when the audit is traced

    def audit(  # noqa: PLR0917 - shard_map passes arguments by position
        state: TrainState, batch: Batch, hyperparameters: dict[str, jax.Array], images: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        reductions: list[tuple[Any, list[allreduce.Bucket]]] = []
        gradients(state, batch, hyperparameters["seed"], images=images, sent=reductions)
        sent = [(tree, bucket) for tree, buckets in reductions for bucket in buckets if bucket.contribution.size]
        facts[:] = [_facts(tree, bucket, parts if isinstance(bucket, allreduce.ShardedBucket) else 1) for tree, bucket in sent]
        findings = []
        for _, bucket in sent:
            bound = rounding_bound(strategy, bucket.contribution.dtype, vertical=vertical, horizontal=horizontal)
            findings.append(compare_sums(bucket, reference, bound))
        return {name: jnp.stack([finding[name] for finding in findings])[None] for name in findings[0]}

    compiled = compiler.compile_mapped(audit, layout, phase, out_specs=PartitionSpec(AXES))
    return AuditProgram(compiled, tuple(facts), strategy, reference, phase.shape)


def _facts(tree: Any, bucket: allreduce.Bucket, parts: int) -> BucketFacts:
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]
    tensors = zip(bucket.indices, bucket.tensors, strict=True)
    sizes = tuple((names[place], shard_size(tensor.shape, parts)) for place, tensor in tensors)
    return BucketFacts(sizes, str(bucket.contribution.dtype), parts)


def local_findings(results: dict[str, jax.Array]) -> dict[str, Any]:
    """What this process's devices found, as JSON values. results: what the audit returns.

    share: the largest difference divided by its bound. buckets: index -> finding, for buckets with a difference above the
    bound. A finding has the sums where they differ most, the devices that found a difference, and the devices whose
    contribution is missing.
    """
    rows = {
        name: {shard.index[0].start: jax.device_get(shard.data)[0] for shard in value.addressable_shards}
        for name, value in results.items()
    }
    buckets = {}
    for bucket in range(len(next(iter(rows["mismatches"].values())))):
        devices = sorted(device for device, counts in rows["mismatches"].items() if counts[bucket])
        if devices:
            worst = {
                name: rows[name][devices[0]][bucket].item() for name in ("first", "second", "bound", "index", "mismatches")
            }
            difference = abs(worst["first"] - worst["second"])
            worst["excess"] = difference / worst["bound"] if math.isfinite(difference) else sys.float_info.max
            texts = {name: f"{worst[name]:.9g}" for name in ("first", "second")}
            texts |= {"difference": f"{difference:.3g}", "bound": f"{worst['bound']:.3g}"}
            missing = [device for device in devices if rows["missing"][device][bucket]]
            buckets[str(bucket)] = worst | texts | {"devices": devices, "missing": missing}
    return {"share": max(share.max().item() for share in rows["share"].values()), "buckets": buckets}


def describe(findings: list[dict[str, Any]], program: AuditProgram, hosts: list[str]) -> str | None:
    """The worst difference that the processes found, as text; None if all sums agree. findings: `local_findings` by rank."""
    differing: dict[int, dict[int, dict]] = {}  # finding by bucket and rank
    for rank, local in enumerate(findings):
        for bucket, finding in local["buckets"].items():
            differing.setdefault(int(bucket), {})[rank] = finding
    if not differing:
        return None
    index = max(differing, key=lambda bucket: max(finding["excess"] for finding in differing[bucket].values()))
    by_rank = differing[index]
    worst = max(by_rank.values(), key=lambda finding: finding["excess"])
    facts, (vertical, horizontal) = program.facts[index], program.mesh_shape

    def devices(kind: str) -> str:
        found = sorted((device, rank) for rank, finding in by_rank.items() for device in finding[kind])
        if len(found) == vertical * horizontal:
            return f"all {len(found)} devices"
        names = []
        for device, rank in found[:MAX_NAMED_DEVICES]:
            process = f" (rank {rank} on {hosts[rank]})" if len(hosts) > 1 else ""
            names.append(f"the device in row {device // horizontal}, column {device % horizontal} of the mesh{process}")
        unnamed = len(found) - MAX_NAMED_DEVICES
        return " and ".join(names) + (f" and {unnamed} more" if unnamed > 0 else "")

    unnamed = len(facts.tensors) - 1
    tensors = facts.tensors[0][0] + (f" and {unnamed} more tensor{'s' * (unnamed > 1)}" if unnamed else "")
    missing, others = devices("missing"), len(differing) - 1
    return "".join(
        [
            f"bucket {index + 1} of {len(program.facts)} ({tensors}; {facts.size:,} values, {facts.dtype}), reduced by ",
            f"{program.strategy} on a {vertical}x{horizontal} mesh, differs from the reference reduction ",
            f"({program.reference}) by up to {worst['difference']}, and rounding explains {worst['bound']}: "
            f"{worst['first']} and {worst['second']} in value {worst['index']}, of {facts.tensor_at(worst['index'])}; ",
            f"{worst['mismatches']:,} value{'s differ' if worst['mismatches'] > 1 else ' differs'}, on ",
            devices("devices"),
            f"; the contribution of {missing} is missing" if missing else "",
            f"; {others} other bucket{'s' * (others > 1)} also differ{'s' * (others == 1)}" if others else "",
        ]
    )


class Audit(Callback):
    """Audits every `guard.audit_every_steps`-th step (see `compile_audit`); attached with this field.

    Raises AuditFailed if a reduction differs from its reference; checkpoints later than the last audit are then renamed.
    """

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps
        self.phase: PlannedPhase | None = None

    def before_step(self, run: Run, batch: dict[str, jax.Array]) -> None:
        if run.phase is not self.phase:
            self.phase = run.phase
            if self._is_due_in_phase(run):
                self._program(run)
        step = run.progress.steps + 1
        if run.phase.devices > 1 and step % self.every_steps == 0:
            complete_steps(run)
            self._audit(run, batch, step)

    def _program(self, run: Run) -> Future[AuditProgram]:
        phase, compiler = run.phase, run.compiler
        return compiler.once(("audit", *compiler.key(phase)), compile_audit, compiler, phase)

    def _is_due_in_phase(self, run: Run) -> bool:
        """Whether any remaining step of the phase is audited."""
        phase, steps = run.phase, run.progress.steps
        remaining = -(-(phase.end - run.progress.samples) // phase.global_batch)
        return phase.devices > 1 and (steps + remaining) // self.every_steps > steps // self.every_steps

    def _audit(self, run: Run, batch: dict[str, jax.Array], step: int) -> None:
        processes, progress = run.processes, run.progress
        processes.set_activity("compile", step, "waiting for the audit's program")
        with run.clock.paused("compilation"):
            program = status.result_of(self._program(run))  # no check for a stop: the rest would wait here
        processes.set_activity("audit", step)
        with run.clock.paused("audit"):
            processes.all_gather_object("all processes to be ready for an audit", None, while_waiting=lambda: None)
            findings = program(
                run.state, batch, run.compiler.hyperparameters(run.phase, run.plan.learning_rate(progress.samples))
            )
            all_findings = processes.all_gather_object("the audit's findings", findings, while_waiting=lambda: None)
            if error := describe(all_findings, program, processes.hosts):
                raise AuditFailed(self._fail(run, step, error))
            progress.audits, progress.audited_step = progress.audits + 1, step
            progress.audited_checkpoint = run.checkpoints.mark_audited()
        add_to_record(run, {"audit_share": max(finding["share"] for finding in all_findings)})

    def _fail(self, run: Run, step: int, error: str) -> str:
        """Rename the checkpoints that may be wrong, and return the message of rank 0."""
        run.checkpoints.wait()
        rollback = run.checkpoints.quarantine_unaudited() if run.is_rank0 else Rollback(None, [], [])
        trusted, suspects, failures = rollback
        cause = "the hardware or a library returned a wrong sum; `jaxdp doctor --verify` tests the devices"
        passed = run.progress.audited_step
        doubt = f"steps after {passed}, whose audit passed, may" if passed else "any step so far may"
        renamed = f"the checkpoints after that are now {', '.join(map(str, suspects))}; " if suspects else ""
        renamed += f"remove {', '.join(failures)} before you continue: it could not be renamed; " if failures else ""
        way = f"continues from {trusted}, the last checkpoint before" if trusted is not None else "starts over"
        message = (
            f"the audit of step {step} failed: {error}; {cause}; {doubt} have used a wrong gradient; "
            f"{renamed}{run.resume_action} {way}"
        )
        return run.processes.all_gather_object("the audit's failure", message, while_waiting=lambda: None)[0]
