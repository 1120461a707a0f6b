"""Bringing the processes of a run and JAX up: how many devices, on which platform, and a clear end where it is not what the
user paid for."""

import atexit
import contextlib
import errno
import os
import sys
from collections import Counter
from pathlib import Path

from jaxdp.config import Compile, ConfigError, Guard
from jaxdp.config import Mesh as MeshConfig
from jaxdp.errors import first_line
from jaxdp.parallel import cluster, compilation, memory
from jaxdp.parallel.alone import Alone
from jaxdp.parallel.team import Team

# Virtual devices share the cores: one may reach a collective long after another, and XLA's default patience is 40 s.
CPU_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
SHUTDOWN_SECONDS = 10

_team: Team | None = None


def join(asked: str = "auto", guard: Guard | None = None, look=lambda: None, **given) -> Team | Alone:
    """The processes of this run, all of them there, as their launcher or the caller says (see `cluster.find`).

    A process joins once; what later calls ask for does not matter. look: called while the others are waited for; may raise.
    """
    global _team
    if _team is None:
        found = cluster.find(asked, **given)
        if found is None:
            return Alone()
        guard = guard or Guard()
        _team = Team(found, 60 * guard.start_minutes, guard.silence_seconds, cluster.visible_gpus(), look)
        atexit.register(_leave)
    return _team


def _leave() -> None:
    """At the end of the process: together with the others, or at once if it has failed, as JAX would wait for them."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None and not _team.failed:  # of the caller's own code, outside a run
        _team.fail(f"{type(error).__name__}: {first_line(error)}")
    if _team.failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    _team.close()


def joined() -> Team | Alone:
    """The team that this process has joined."""
    return _team or Alone()


def nvidia_gpu_present() -> bool:
    """Whether this machine has an NVIDIA GPU with its driver, whatever JAX sees."""
    return Path("/dev/nvidia0").exists() or any(Path("/proc/driver/nvidia/gpus").glob("*"))


def start(config: MeshConfig, team: Team | Alone | None = None, compile: Compile | None = None):
    """The devices of a run, JAX being started if it was not: all accelerators, or each process's CPU split into `cpu_devices`.

    They come host by host, and in a host process by process. With `keep_memory` a CPU that is the only device computes in the
    calling thread, and this process keeps its memory, for good. compile: where programs are kept; None: as JAX was told. Raises
    ConfigError where the machine has an NVIDIA GPU that JAX does not see (unless JAX_PLATFORMS=cpu asks for that), where JAX's
    platform does not start, where it already runs in this process with fewer CPU devices, and where the processes do not have
    equally many devices.
    """
    team = team or joined()
    if CPU_PATIENCE.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CPU_PATIENCE}".strip()
    import jax

    if compile:
        compilation.keep_programs(compile)
    wanted = config.cpu_devices or 1
    with contextlib.suppress(RuntimeError):  # JAX has started: the devices there are decide below
        jax.config.update("jax_num_cpu_devices", wanted)
    keep = config.keep_memory and wanted == 1 and team.processes == 1 and not _gpu_expected()
    if keep:
        with contextlib.suppress(AttributeError):  # a later release may not have it: steps are slower then, and the same
            jax.config.update("jax_cpu_enable_async_dispatch", False)  # the step runs in the main thread, whose memory is kept
    if team.processes > 1:
        _start_processes(team)
    elif jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ConfigError(
            f"jax.distributed runs in this process already, with {jax.process_count()} processes that jaxdp does not know of; "
            "leave jax.distributed.initialize out: jaxdp reads the launcher's variables itself"
        )
    try:
        devices = jax.devices()
    except Exception as error:  # by platform and release: RuntimeError, AssertionError, JaxRuntimeError
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = first_line(error)
        raise ConfigError(
            f"JAX_PLATFORMS: {asked!r} is not allowed; that platform does not start here ({reason}); "
            "unset it, or set it to cpu to train on the CPU"
        ) from None
    by_process = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    if devices[0].platform == "cpu":
        _check_cpu(len(jax.local_devices()), wanted)
        by_process = {process: own[:wanted] for process, own in by_process.items()}
        if keep:
            memory.keep_freed()
    counts = {process: len(own) for process, own in by_process.items()}
    if len(set(counts.values())) > 1:
        fewest, most = min(counts, key=counts.get), max(counts, key=counts.get)
        raise ConfigError(
            f"rank {fewest} on {team.hosts[fewest]} has {counts[fewest]} devices and rank {most} on {team.hosts[most]} "
            f"{counts[most]}; give each process equally many"
        )
    order = sorted(by_process, key=lambda process: (team.host_numbers[process], process))
    return [device for process in order for device in by_process[process]]


def _gpu_expected() -> bool:
    return nvidia_gpu_present() and "cpu" not in os.environ.get("JAX_PLATFORMS", "").split(",")


def _check_cpu(there: int, wanted: int) -> None:
    if _gpu_expected():
        raise ConfigError(
            "this machine has an NVIDIA GPU that JAX does not see: install jaxdp with its extra cuda12 or cuda13 "
            "(pip install -e '.[cuda13]'), or set JAX_PLATFORMS=cpu to train on the CPU"
        )
    if there < wanted:
        raise ConfigError(
            f"mesh.cpu_devices: {wanted} is not allowed; JAX runs in this process with {there} CPU "
            f"device{'s' * (there > 1)} already; start a new process (or restart the kernel)"
        )


def _start_processes(team: Team) -> None:
    """JAX's own line between the processes, without its SIGTERM handler, which would swallow the signal that ours waits for."""
    import jax

    if jax.distributed.is_initialized():
        return
    given = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    own = [int(one) for one in given.split(",")] if given else None
    own = own or cluster.own_gpus(team.gpus_here[team.local_rank], team.gpus_here, team.local_rank)
    with contextlib.suppress(AttributeError):  # a later release may not have it
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            team.jax_address,
            team.processes,
            team.rank,
            local_device_ids=own,
            cluster_detection_method="deactivate",  # which under Slurm and Open MPI would leave this process one GPU
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except Exception as error:
        raise ConnectionError(
            errno.ECONNABORTED,
            f"jax.distributed does not start at {team.jax_address} ({first_line(error)}); see whether the hosts reach one "
            "another at all ports, and whether a JAX computation ran before",
        ) from None


def of_gloo(error: Exception) -> str:
    """What to add to the error of a collective among CPUs. All but gloo's reduce-scatter wait for as long as they are told
    (jax-ml/jax#40831)."""
    if "Gloo ReduceScatter" not in str(error):
        return ""
    return " (on CPUs a reduce-scatter waits for 30 s; on a machine so loaded, --reduce.strategy psum waits longer)"


def hosts_with_equally_many(team: Team | Alone) -> int:
    """The number of hosts, which then are the rows of the mesh; 1 where they do not have equally many processes."""
    counts = Counter(team.host_numbers)
    return len(counts) if len(set(counts.values())) == 1 else 1


def describe(devices, team: Team | Alone | None = None) -> str:
    """Number and kind of devices, for people, and over what they are spread."""
    spread = ""
    if team and team.processes > 1:
        hosts = len(set(team.host_numbers))
        spread = f" of {team.processes} processes on {hosts} host{'s' * (hosts > 1)}"
    return f"{len(devices)} x {devices[0].device_kind}{spread}"
