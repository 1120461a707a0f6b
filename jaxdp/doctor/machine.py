"""Checks of memory, cores, disks and limits of this machine against the needs of a recipe."""

import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

from jaxdp.choices import SOURCES
from jaxdp.config import Config
from jaxdp.doctor.check_result import ResultBuilder
from jaxdp.errors import plural
from jaxdp.files import expand_user, no_directory_reason
from jaxdp.xla import options

GIB, MB = 2**30, 10**6
FREE_DISK_BYTES = GIB  # for the compilation cache and for temporary files
OPEN_FILES = 2048  # ImageNet has 1,024 files; the rest is a margin
SHARED_MEMORY_BYTES = GIB  # for NCCL's buffers between processes of one host
MEASURE_SECONDS = 0.5


def format_bytes(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MB:,.0f} MB"


def check_memory(result: ResultBuilder, state_bytes: int | None, input_bytes: int | None) -> None:
    """Free memory, within the cgroup's limit, holds a copy of the state and the images in flight; None: unknown."""
    fields = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = {name: 1024 * int(rest.split()[0]) for name, rest in fields}
    free, total, source = memory["MemAvailable"], memory["MemTotal"], ""
    if cgroup := _cgroup_memory():
        used, limit = cgroup
        if limit < total:
            free, total, source = min(free, limit - used), limit, " (cgroup limit)"
    message = f"{format_bytes(free)} free of {format_bytes(total)}{source}"
    if state_bytes is None or input_bytes is None:
        result.ok(f"{message}; the need of the recipe is unknown")
        return
    needed = state_bytes + input_bytes
    message += f"; a copy of the state and images in flight take {format_bytes(needed)}"
    if needed > free:
        result.error(message, "free memory")
    else:
        result.ok(message)


def _cgroup_memory() -> tuple[int, int] | None:
    """(used, limit) in bytes of this process's cgroup, version 2 or 1; None if it has no limit."""
    for used, limit in (("memory.current", "memory.max"), ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes")):
        try:
            return int(Path("/sys/fs/cgroup", used).read_text()), int(Path("/sys/fs/cgroup", limit).read_text())
        except (OSError, ValueError):  # the other version of cgroups, or "max"
            continue
    return None


def check_cores(result: ResultBuilder, config: Config, *, images_per_second: float | None, devices: int) -> None:
    """Enough cores to decode `images_per_second` for each device; the decoding speed of one core is measured."""
    cores: float = len(os.sched_getaffinity(0))
    result.ok(f"{cores} core{'s' * (cores != 1)}")
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max" and int(quota) < cores * int(period):
            cores = int(quota) / int(period)
            result.ok(f"the cgroup allows {cores:g} of them")
    except (OSError, ValueError):
        pass
    if SOURCES[config.data.source].in_memory:
        result.ok(f"{config.data.source} needs no decoding")
        return
    rate = images_per_core_second(config)
    result.ok(f"one core decodes and crops {rate:,.0f} images/s (measured with JPEGs of 400x350)")
    if images_per_second is None:
        result.ok("the need of a run is unknown; give --images-per-second")
        return
    total_rate = images_per_second * max(devices, 1)
    needed = total_rate / rate
    message = f"{total_rate:,.0f} images/s need {needed:.1f} cores"
    if needed > cores:
        result.warning(message, "use more cores, or processes on more hosts (docs/data.md): devices will wait for images")
    else:
        result.ok(message)


def images_per_core_second(config: Config) -> float:
    """Measure how many images per second one core decodes and crops for the recipe."""
    import numpy as np

    from jaxdp.bench.input import make_images
    from jaxdp.data.decode import Scratch, decode
    from jaxdp.data.transforms import training_transform

    shape, side = training_transform(config)
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), 8)
        encoded = [path.read_bytes() for path in sorted(Path(folder).rglob("*.jpg"))]
    scratch, row = Scratch(), np.empty((side, side, 3), np.uint8)

    def decode_all() -> None:
        for index, data in enumerate(encoded):
            shape(decode(data, scratch), row, index)

    decode_all()  # warm-up
    count, start = 0, time.thread_time()
    while time.thread_time() - start < MEASURE_SECONDS:
        decode_all()
        count += len(encoded)
    return count / (time.thread_time() - start)


def _free_space(path: Path) -> tuple[int, bool, Path]:
    """(free bytes, whether it is writable, the directory) of the nearest existing ancestor of a path."""
    path = path.absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    writable = os.access(existing, os.W_OK | os.X_OK) and existing.is_dir()
    return shutil.disk_usage(existing).free, writable, existing


def check_disk(result: ResultBuilder, config: Config, *, workdir: Path, state_bytes: int | None) -> None:
    """The disk of `workdir` holds the recipe's checkpoints, and temporary files can be written."""
    free, writable, existing = _free_space(workdir)
    message = f"{format_bytes(free)} free for {workdir}"
    reason = no_directory_reason(workdir, OSError(""))
    if reason:
        result.error(f"{workdir}: {reason}", "give another --workdir")
    elif not writable:
        result.error(f"{existing} is not writable", "give another --workdir, or make it writable")
    elif state_bytes is None:
        result.ok(f"{message}; the size of a checkpoint is unknown")
    else:
        count = config.checkpoint.keep + 2  # the best one, and the one being written
        message += f"; {plural(count, 'checkpoint')}: {format_bytes(count * state_bytes)}"
        if count * state_bytes > free:
            result.error(message, "free space, give another --workdir, or lower --checkpoint.keep")
        else:
            result.ok(message)
    temporary, variable = Path(tempfile.gettempdir()), os.environ.get("TMPDIR")
    if variable and Path(variable).absolute() != temporary.absolute():
        fix = "create it, free space on its disk, or set TMPDIR to another directory"
        result.warning(f"TMPDIR={variable} is not writable; {temporary} is used instead", fix)
    free, _, _ = _free_space(temporary)
    if free < FREE_DISK_BYTES:
        result.warning(f"{format_bytes(free)} free for temporary files in {temporary}", "free space, or set TMPDIR")
    else:
        result.ok(f"{format_bytes(free)} free for temporary files in {temporary}")


def check_compilation_cache(result: ResultBuilder, config: Config) -> None:
    """The directory of the compilation cache is writable and has free space."""
    setting = config.compile.cache
    if setting == "off":
        result.ok("off: every run compiles its programs again")
        return
    variable = os.environ.get(options.CACHE_VARIABLE) if setting == "auto" else None
    path = Path(expand_user(variable, options.CACHE_VARIABLE)) if variable else options.cache_directory(setting)
    if path is None:
        result.warning("no home directory", "set HOME, XDG_CACHE_HOME or --compile.cache")
        return
    free, writable, existing = _free_space(path)
    reason = no_directory_reason(path, OSError(""))
    if reason or not writable:
        report = result.warning if setting == "auto" else result.error
        report(f"{path} is not writable ({reason or existing}): every run compiles its programs again", "set --compile.cache")
        return
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    result.ok(f"{path}: {plural(len(sizes), 'file', ',')}, {format_bytes(sum(sizes))}")
    if free < FREE_DISK_BYTES:
        first_step = "empty the cache" if sizes else "free space on its disk"
        result.warning(f"{format_bytes(free)} free", f"{first_step}, or set --compile.cache to another directory")
    else:
        result.ok(f"{format_bytes(free)} free")


def check_open_files(result: ResultBuilder) -> None:
    """The hard limit of open files suffices for large data sets; a run raises its soft limit up to the hard one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = limits[1]
    message = ", at most ".join("unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}" for limit in limits)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        result.warning(
            f"{message}; a large prepared data set opens up to {OPEN_FILES:,}",
            f"raise the hard limit (ulimit -Hn) to {OPEN_FILES:,}",
        )
    else:
        result.ok(message)


def check_shared_memory(result: ResultBuilder, gpus: int) -> None:
    """/dev/shm is large enough for NCCL, which uses it between GPUs of one host that have no faster link."""
    path = Path("/dev/shm")
    if not path.is_dir():
        if gpus > 1:
            result.warning("/dev/shm does not exist", "mount a tmpfs at /dev/shm: NCCL uses it between processes of a host")
        else:
            result.ok("/dev/shm does not exist")
        return
    free = shutil.disk_usage(path).free
    if gpus > 1 and free < SHARED_MEMORY_BYTES:
        result.warning(f"{format_bytes(free)} free in /dev/shm", "enlarge it, for example docker run --shm-size 8g")
    else:
        result.ok(f"{format_bytes(free)} free in /dev/shm")
