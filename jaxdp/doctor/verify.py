"""`jaxdp doctor --verify`: proofs of the training step, of reductions and of resuming on the devices of this machine."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxdp import models
from jaxdp.bench.environment import provenance
from jaxdp.config import Config, Mesh
from jaxdp.distributed import runtime
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.doctor import verify_gradients, verify_resume
from jaxdp.doctor.proof import Proof, build_on_all_ranks, prove
from jaxdp.errors import ConfigError
from jaxdp.parallel import timing
from jaxdp.parallel.mesh import choose_shape, make_mesh, most_square
from jaxdp.strategies import STRATEGIES, unsupported_reason
from jaxdp.xla.jax_options import jaxdp_jax_config

CPU_DEVICES = 4  # virtual devices of a CPU, unless --mesh.cpu-devices is given
CALLS = 3  # of each reduction


@jaxdp_jax_config()
def run(
    config: Config,
    info: Callable[[str], None] = lambda text: None,
    *,
    group: ProcessGroup | None = None,
    shared_dir: Path | None = None,
    thorough: bool = False,
) -> dict:
    """Run the proofs on all devices of all processes and return their record for JSON.

    thorough: gradients on every mesh, not only on the config's.
    An interrupt ends the proofs: "stopped" of the record is then true, and "proofs" are those that have ended.
    A CPU is split into `mesh.cpu_devices`, by default 4 divided by the number of processes. Model, mesh and wire dtype of
    `config` determine the messages; the runs of the proof of exact resume use its optimizer. info: receives progress lines.
    group: the processes; all call this. shared_dir: a directory on a file system that all processes share. Raises
    ConfigError if the devices do not start.
    """
    start, group = time.perf_counter(), group or ProcessGroup()
    cpu_devices = config.mesh.cpu_devices or max(1, CPU_DEVICES // group.num_processes)
    if group.num_processes == 1:
        cpu_devices = max(cpu_devices, 2)
    config = dataclasses.replace(config, compile=dataclasses.replace(config.compile, deterministic=True))
    devices = runtime.start(Mesh(cpu_devices=cpu_devices), group, cache=True)
    on_cpu = devices[0].platform == "cpu"

    def all_proofs() -> Iterator[Proof]:
        shape = mesh_shape(config, len(devices), group.num_processes)
        shapes = verify_gradients.mesh_shapes(len(devices)) if thorough else [shape]
        yield from verify_gradients.proofs(devices, config.compile, shapes=shapes, info=info, group=group)
        yield from sum_proofs(config, devices, info=info, group=group)
        info("exact resume: an interrupted run against an uninterrupted one ...")
        cpu = cpu_devices if on_cpu else None
        yield verify_resume.proof(config, len(devices), cpu, shared_dir=shared_dir, group=group)

    proofs, stopped = list[Proof](), False
    try:
        for proof in all_proofs():
            proofs.append(proof)
            info(f"  {proof}")
    except KeyboardInterrupt:
        stopped = True
    processes = f" of {group.num_processes} processes" if group.num_processes > 1 else ""
    return {
        "provenance": provenance(),
        "device": f"{len(devices)} x {devices[0].device_kind}{processes}",
        "virtual": on_cpu,
        "seconds": time.perf_counter() - start,
        "thorough": thorough,
        "stopped": stopped,
        "failed": [proof.name for proof in proofs if not proof.passed],
        "proofs": [proof.to_dict() for proof in proofs],
    }


def summarize(record: dict) -> str:
    """The summary of a record, with the names of the failed proofs."""
    text = f"{len(record['proofs'])} proofs on {record['device']} in {record['seconds']:.0f} s"
    passed = "stopped; those before it passed" if record["stopped"] else "all passed"
    return f"{text}; FAILED: {', '.join(record['failed'])}" if record["failed"] else f"{text}; {passed}"


def mesh_shape(config: Config, devices: int, processes: int) -> tuple[int, int]:
    """The recipe's mesh shape if it fits the devices, else the most square one of all of them."""
    try:
        return choose_shape(config.mesh, devices, processes)
    except ConfigError:
        return most_square(devices)


def sum_proofs(
    config: Config, devices: Sequence[jax.Device], *, info: Callable[[str], None], group: ProcessGroup
) -> Iterator[Proof]:
    """For every strategy: sum the gradient as one message in the recipe's wire dtype, `CALLS` times.

    The messages are integers whose sum is exact; the sums are compared bit by bit on all devices.
    """
    size = config.data.image_size
    model = models.create(config.model)
    shapes, _ = models.initial_shapes(model, (size, size, 3))
    elements = sum(leaf.size for leaf in jax.tree.leaves(model.trainable(shapes, config.finetune.frozen_stages)))
    message = jax.ShapeDtypeStruct((elements,), jnp.dtype(config.reduce.wire_dtype))
    shape = mesh_shape(config, len(devices), group.num_processes)
    mesh = make_mesh(*shape, devices)
    text = f"{elements * message.dtype.itemsize:,} bytes of {message.dtype}"
    info(f"exact sums: messages of {text} on {shape[0]}x{shape[1]} ...")

    def count_wrong_sums(strategy: str, name: str) -> int:
        def build() -> timing.Reduction:
            return timing.Reduction(mesh, message, strategy, bucket_bytes=None, config=config)

        reduction = build_on_all_ranks(group, name, build)
        return sum(not reduction.is_exact(reduction()) for _ in range(CALLS))

    for strategy in STRATEGIES:
        if unsupported_reason(strategy, mesh.size):
            continue
        name = f"exact sums: {strategy} on {shape[0]}x{shape[1]}"
        yield prove(
            name,
            f"wrong results of {CALLS} calls, {text}",
            tolerance=0,
            difference=partial(count_wrong_sums, strategy, name),
            group=group,
        )
