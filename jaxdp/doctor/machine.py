"""Checks of memory, disks, object storage and limits against what a recipe needs."""

import os
import resource
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from jaxdp.config import Config
from jaxdp.distributed import launchers
from jaxdp.doctor.check_result import ERROR, OK, WARNING, ResultBuilder
from jaxdp.errors import StorageError, plural
from jaxdp.files import expand_user, no_directory_reason
from jaxdp.xla import options

GIB, MB = 2**30, 10**6
FREE_DISK_BYTES = GIB  # for the compilation cache and for temporary files
OPEN_FILES = 2048  # ImageNet has 1,024 files; the rest is a margin
SHARED_MEMORY_BYTES = GIB  # for NCCL's buffers between processes of one host
SHARED_MEMORY = Path("/dev/shm")
SLOW_REQUEST_SECONDS = 1.0


def format_bytes(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MB:,.0f} MB"


def check_memory(result: ResultBuilder, state_bytes: int | str) -> None:
    """Free memory, within the cgroup's limit, holds a copy of the state. state_bytes: why, if it is unknown."""
    fields = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = {name: 1024 * int(rest.split()[0]) for name, rest in fields}
    free, total, source = memory["MemAvailable"], memory["MemTotal"], ""
    if cgroup := _cgroup_memory():
        used, limit = cgroup
        if limit < total:
            free, total, source = min(free, limit - used), limit, " (cgroup limit)"
    message = f"{format_bytes(free)} free of {format_bytes(total)}{source}"
    if isinstance(state_bytes, str):
        return result.ok(f"{message}; {state_bytes}")
    message += f"; a copy of the state takes {format_bytes(state_bytes)}"
    result.add(ERROR if state_bytes > free else OK, message, "free memory")


def _cgroup_memory() -> tuple[int, int] | None:
    """(used, limit) in bytes of this process's cgroup, version 2 or 1; None if it has no limit."""
    for used, limit in (("memory.current", "memory.max"), ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes")):
        try:
            return int(Path("/sys/fs/cgroup", used).read_text()), int(Path("/sys/fs/cgroup", limit).read_text())
        except (OSError, ValueError):  # the other version of cgroups, or "max"
            continue
    return None


def _free_space(path: Path) -> tuple[int, Path]:
    """(free bytes, the directory) of the nearest existing ancestor of a path."""
    path = path.absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free, existing


def check_disk(result: ResultBuilder, config: Config, *, workdir: Path, state_bytes: int | str) -> None:
    """The disk of `workdir` holds the recipe's checkpoints; those of temporary files and compiled programs have free space."""
    free, existing = _free_space(workdir)
    message = f"{format_bytes(free)} free for {workdir}"
    if reason := no_directory_reason(workdir, OSError("")):
        result.error(f"{workdir}: {reason}", "give another --workdir")
    elif not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        result.error(f"{existing} is not writable", "give another --workdir, or make it writable")
    elif isinstance(state_bytes, str):
        result.ok(f"{message}; {state_bytes}")
    else:
        count = config.checkpoint.keep + 2  # the best one, and the one being written
        message += f"; {plural(count, 'checkpoint')}: {format_bytes(count * state_bytes)}"
        fix = "free space, give another --workdir, or lower --checkpoint.keep"
        result.add(ERROR if count * state_bytes > free else OK, message, fix)
    folders = {"temporary files": Path(tempfile.gettempdir())}
    if cache := os.environ.get(options.CACHE_VARIABLE) or options.cache_directory():
        folders["compiled programs"] = Path(expand_user(str(cache), options.CACHE_VARIABLE))
    for content, folder in folders.items():
        free, _ = _free_space(folder)
        message = f"{format_bytes(free)} free for {content} in {folder}"
        fix = f"free space, or set TMPDIR or {options.CACHE_VARIABLE} to another directory"
        result.add(WARNING if free < FREE_DISK_BYTES else OK, message, fix)


def check_limits(result: ResultBuilder) -> None:
    """Open files, whose soft limit a run raises to the hard one, and /dev/shm, through which NCCL connects GPUs of a host."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    message = f"{'unlimited' if unlimited else f'{hard:,}'} open files"
    fix = f"raise the hard limit (ulimit -Hn) to {OPEN_FILES:,}, which a large prepared data set opens"
    result.add(WARNING if not unlimited and hard < OPEN_FILES else OK, message, fix)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    message = f"{format_bytes(free)} free in {SHARED_MEMORY}"
    is_small = len(launchers.visible_gpus()) > 1 and free < SHARED_MEMORY_BYTES
    result.add(WARNING if is_small else OK, message, "enlarge it, for example docker run --shm-size 8g: NCCL needs it")


def check_storage(result: ResultBuilder, url: str) -> None:
    """Objects can be written, read, listed and removed at the URL of a run, and created only once. Raises ConfigError."""
    from jaxdp.cloud.patience import open_patiently

    location, name, content = open_patiently(url, "--workdir"), f".doctor-{secrets.token_hex(4)}", b"x" * 1000
    began = time.monotonic()
    try:
        location.create(name, content)
        created_again = location.create(name, content)
        is_same = location.read(name) == content and name in location.top_sizes()
        location.remove([name])
    except StorageError as error:
        fix = "check the URL, the credentials and their permissions: reading, writing, listing, removing"
        result.error(str(error), fix)
        return
    seconds = (time.monotonic() - began) / 5
    message = f"{url} can be written and read, {1000 * seconds:.0f} ms a request"
    if not is_same:
        result.error(f"{url} does not return what was written", "use another URL")
    elif created_again:
        fix = "do not start two runs there at the same moment"
        result.warning(f"{message}; it does not support conditional writes", fix)
    elif seconds > SLOW_REQUEST_SECONDS:
        result.warning(message, "use a bucket in the region of this machine")
    else:
        result.ok(message)
