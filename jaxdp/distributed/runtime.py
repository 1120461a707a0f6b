"""Start of a run's processes and of JAX: joins the process group, starts JAX's platform and returns the devices in order."""

import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdp.config import Guard
from jaxdp.config import Mesh as MeshConfig
from jaxdp.distributed import coordination, launchers, tpu, watchdog
from jaxdp.distributed.process_group import JoinedProcesses, ProcessGroup
from jaxdp.distributed.signal_handler import Stopped
from jaxdp.distributed.stack_traces import place_of
from jaxdp.distributed.status import FOLDER, Board, Directory, Failure
from jaxdp.errors import EXIT_STOPPED, ConfigError, first_line, plural
from jaxdp.xla import jax_options, options

if TYPE_CHECKING:
    import jax

# Virtual devices share the cores, so one may reach a collective long after another; XLA's default timeout is 40 s.
CPU_COLLECTIVE_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"

TRIM_THRESHOLD, MMAP_MAX = (-1, 2**31 - 1), (-4, 0)  # parameters of glibc's mallopt(3) by number, with their values

_group: JoinedProcesses | None = None


def join(
    launcher: str = "auto",
    *,
    guard: Guard | None = None,
    while_waiting: Callable[[], None] = lambda: None,
    directory: Path | None = None,
    open_board: Callable[[], Board] | None = None,
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
) -> ProcessGroup:
    """The process group of this run, once all processes have connected.

    A process joins once; later calls return the same group. launcher, coordinator, processes, rank: see `launchers.detect`.
    while_waiting: called while waiting for other processes; may raise. directory: the run's directory, where all processes keep
    their status files. open_board: opens a different place for these files, for processes that share no directory. Raises
    ConfigError if a run of several processes has no directory.
    """
    global _group
    _register_exit()
    if _group is None:
        cluster = launchers.detect(launcher, coordinator=coordinator, processes=processes, rank=rank)
        if cluster is None:
            return ProcessGroup()
        if directory is None:
            raise ConfigError("--workdir", reason="is missing: several processes need a directory that they share")
        guard = guard or Guard()
        board = open_board() if open_board else Directory(directory / FOLDER)
        _group = JoinedProcesses.join(cluster, board, watchdog.limits_from(guard), while_waiting=while_waiting)
    return _group


@functools.cache
def _register_exit() -> None:
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Leave the group with the other processes. After a failure, exit at once, because JAX's shutdown would block.

    All processes exit with the failure's code, so that `jaxdp launch` does not restart after a configuration error. A program
    that does not catch `Stopped` exits with the code of `Stopped`, without waiting for compilations in threads.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    stopped = isinstance(error, Stopped)  # raised on every process
    if _group is not None:
        if error is not None and not stopped and _group.failure is None:  # raised by the caller's code outside of a run
            _group.fail(Failure(f"{type(error).__name__}: {first_line(error)}", place=place_of(error)))
        if _group.failure is None:
            _group.close()
    failure = _group and _group.failure
    if stopped or failure:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.code if failure else EXIT_STOPPED)


@contextlib.contextmanager
def fail_together(group: ProcessGroup) -> Iterator[None]:
    """Report an error raised in the context to the other processes, which exit and name this one."""
    try:
        yield
    except BaseException as error:
        group.fail(Failure.of(error))
        raise


def exit_together(group: ProcessGroup, code: int = 0, *, directory: Path | None = None) -> None:
    """End a command of several processes with an exit code. Returns if there is one process and the code is 0.

    directory: the directory of their status files, which is removed once all have left; None removes nothing.
    """
    if group.num_processes > 1:
        sys.stdout.flush()
        group.close()
        if directory is not None and group.is_rank0:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(code)  # JAX's shutdown blocks for minutes if a process is late
    if code:
        sys.exit(code)


def current_group() -> ProcessGroup:
    """The process group that this process has joined."""
    return _group or ProcessGroup()


def nvidia_gpu_present() -> bool:
    """Whether this machine has an NVIDIA GPU with its driver, whether or not JAX can use it."""
    return Path("/dev/nvidia0").exists() or any(Path("/proc/driver/nvidia/gpus").glob("*"))


def start(config: MeshConfig, group: ProcessGroup | None = None, *, cache: bool = False) -> "list[jax.Device]":
    """Start JAX if it is not running, and return the run's devices, sorted by host and then by process.

    The devices are all accelerators, or the CPU of each process split into `cpu_devices`. A CPU that is the only
    device computes in the calling thread. From then on, this process keeps freed memory, which later steps reuse. cache: store
    compiled programs; False keeps JAX's own setting.

    Raises ConfigError if JAX's platform does not start, or if JAX does not see the machine's NVIDIA GPU or TPU (unless
    JAX_PLATFORMS=cpu asks for that). Also raises it if JAX already runs in this process with fewer CPU devices, if the
    processes have different numbers of devices, if these are not the processes of a TPU slice, or for an option of JAX that
    changes or breaks a run.
    """
    group = group or current_group()
    if CPU_COLLECTIVE_TIMEOUT.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CPU_COLLECTIVE_TIMEOUT}".strip()
    import jax

    jax_options.check()
    if cache:
        options.enable_compilation_cache()
    cpu_devices = config.cpu_devices or 1
    with contextlib.suppress(RuntimeError):  # JAX is running: `_check_cpu` decides whether its devices suffice
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    keep = cpu_devices == 1 and group.num_processes == 1 and not _expected_accelerator()
    if keep:
        with contextlib.suppress(AttributeError):  # without this option, steps are slower and give the same results
            jax.config.update("jax_cpu_enable_async_dispatch", False)  # the step runs in the main thread, whose memory is kept
    if isinstance(group, JoinedProcesses) and group.num_processes > 1:
        if not jax.distributed.is_initialized():
            coordination.initialize(group, local_device_ids=_local_device_ids(group))
    elif jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ConfigError(
            "jax.distributed",
            reason=f"is already initialized in this process, with {plural(jax.process_count(), 'process')}",
            hint="remove jax.distributed.initialize: jaxdp reads the launcher's variables",
        )
    available, by_process = _jax_devices(), dict[int, list[jax.Device]]()
    for device in available:
        by_process.setdefault(device.process_index, []).append(device)
    if available[0].platform == "tpu":
        _check_workers(len(by_process), jax.process_index(), group)
    elif available[0].platform == "cpu":
        _check_cpu(len(jax.local_devices()), cpu_devices)
        by_process = {process: devices[:cpu_devices] for process, devices in by_process.items()}
        if keep:
            keep_freed_memory()
    _check_equal_counts({process: len(devices) for process, devices in by_process.items()}, group.hosts)
    order = sorted(by_process, key=lambda process: (group.host_numbers[process], process))
    return [device for process in order for device in by_process[process]]


def keep_freed_memory() -> None:
    """Keep freed memory in this process, which then holds the most it ever used. Without glibc, nothing happens.

    The activations of a step are one block, freed when the step ends. By default the C library returns such a block to the
    system, which clears every page again in the next step. Other threads than the main one have arenas of at most 64 MB, so
    only the step of a single device, which runs in the main thread, keeps its memory.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for number, value in (TRIM_THRESHOLD, MMAP_MAX):
            mallopt(number, value)


def _jax_devices() -> "list[jax.Device]":
    import jax

    try:
        return jax.devices()
    except Exception as error:  # by platform and release: RuntimeError, AssertionError, JaxRuntimeError
        users = tpu.users() if tpu.chip_drivers() else ""
        raise ConfigError(
            "JAX_PLATFORMS",
            os.environ.get("JAX_PLATFORMS", ""),
            reason=f"this JAX platform does not start ({first_line(error)})",
            hint=f"end {users}, which uses the TPU" if users else "unset it, or set it to cpu to train on the CPU",
        ) from None


def _check_equal_counts(counts: dict[int, int], hosts: list[str]) -> None:
    fewest, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if counts[fewest] != counts[most]:
        raise ConfigError(
            "devices",
            reason=f"rank {fewest} on {hosts[fewest]} has {counts[fewest]} and rank {most} on {hosts[most]} has {counts[most]}",
            hint="give each process the same number of devices",
        )


def _check_workers(processes: int, rank: int, group: ProcessGroup) -> None:
    """The processes of a TPU slice are those of its network, however they were started."""
    if (processes, rank) != (group.num_processes, group.rank):
        raise ConfigError(
            "processes",
            group.num_processes,
            reason=f"this is rank {group.rank}; in the TPU slice it is rank {rank} of {processes}",
            hint=f"start the same command on every worker (--worker=all), or set {tpu.HOSTNAMES} and {tpu.WORKER}",
        )


def _expected_accelerator() -> tuple[str, str] | None:
    """(accelerator of this machine, extras that install its plugin), unless JAX_PLATFORMS asks for the CPU."""
    if "cpu" in os.environ.get("JAX_PLATFORMS", "").split(","):
        return None
    if nvidia_gpu_present():
        return "NVIDIA GPU", "cuda12 or cuda13 (pip install -e '.[cuda13]')"
    return ("TPU", "tpu (pip install -e '.[tpu]')") if tpu.chip_drivers() else None


def _check_cpu(available: int, required: int) -> None:
    if accelerator := _expected_accelerator():
        name, extras = accelerator
        raise ConfigError(
            "JAX_PLATFORMS",
            reason=f"JAX does not see this machine's {name}",
            hint=f"install jaxdp with its extra {extras}, or set JAX_PLATFORMS=cpu to train on the CPU",
        )
    if available < required:
        raise ConfigError(
            "mesh.cpu_devices",
            required,
            reason=f"JAX already runs in this process with {available} CPU device{'s' * (available > 1)}",
            hint=f'call jax.config.update("jax_num_cpu_devices", {required}) before the first use of JAX (in a notebook, after '
            f"a restart of the kernel), or set --mesh.cpu-devices {available}",
        )


def _local_device_ids(group: JoinedProcesses) -> list[int] | None:
    """The GPUs of this process: its share of the host's GPUs, unless the environment names them; None for all."""
    if requested := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        return [int(number) for number in requested.split(",")]
    host, numbers = group.host_numbers[group.rank], group.host_numbers
    visible = [gpus for gpus, number in zip(group.gpus, numbers, strict=True) if number == host]
    return launchers.assign_gpus(visible, numbers[: group.rank].count(host))


def uniform_host_count(group: ProcessGroup) -> int:
    """The number of hosts, which become the rows of the mesh; 1 if the hosts have different numbers of processes."""
    counts = Counter(group.host_numbers)
    return len(counts) if len(set(counts.values())) == 1 else 1


def describe(devices: list[Any], group: ProcessGroup | None = None) -> str:
    """Number and kind of the devices, with the number of processes and hosts."""
    spread = ""
    if group and group.num_processes > 1:
        hosts = len(set(group.host_numbers))
        spread = f" of {group.num_processes} processes on {hosts} host{'s' * (hosts > 1)}"
    return f"{len(devices)} x {devices[0].device_kind}{spread}"
