"""Memory, cores, disks and limits of this machine, against what a run needs."""

import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

from jaxdp.config import IN_MEMORY, Config
from jaxdp.doctor.finding import Findings
from jaxdp.parallel import compilation

GIB, MB = 2**30, 10**6
SPARE_BYTES = GIB  # that the cache of programs and temporary files should find free
FILES = 2048  # open at a time: those of ImageNet, 1,024, and a margin
SHARED_BYTES = GIB  # NCCL's buffers between the processes of a host lie there
MEASURED_SECONDS = 0.5


def size(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MB:,.0f} MB"


def memory(findings: Findings, state_bytes: int | None, host_bytes: int | None) -> None:
    """state_bytes: of a checkpoint, of which the host keeps a copy; host_bytes: of images on their way to the devices."""
    lines = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    held = {name: 1024 * int(rest.split()[0]) for name, rest in lines}
    free, whole, what = held["MemAvailable"], held["MemTotal"], ""
    if limit := _memory_limit():
        used, most = limit
        if most < whole:
            free, whole, what = min(free, most - used), most, " (limit of the control group)"
    told = f"{size(free)} free of {size(whole)}{what}"
    if state_bytes is None or host_bytes is None:
        findings.ok(f"{told}; what the recipe needs is not known")
        return
    needed = state_bytes + host_bytes
    told += f"; a copy of the state and images on their way take {size(needed)}"
    if needed > free:
        findings.wrong(told, "free memory, or lower --data.ahead-bytes")
    else:
        findings.ok(told)


def _memory_limit() -> tuple[int, int] | None:
    """(used, allowed) bytes of this process's control group, where it has a limit."""
    for used, most in (("memory.current", "memory.max"), ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes")):
        try:
            return int(Path("/sys/fs/cgroup", used).read_text()), int(Path("/sys/fs/cgroup", most).read_text())
        except (OSError, ValueError):  # not this version of control groups, or "max"
            continue
    return None


def cores(findings: Findings, config: Config, images_per_second: float | None, devices: int) -> None:
    """Cores, and the threads that decode for `images_per_second` on each of the devices, by a measurement on the spot."""
    there = len(os.sched_getaffinity(0))
    findings.ok(f"{there} core{'s' * (there != 1)}")
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max" and int(quota) < there * int(period):
            there = int(quota) / int(period)
            findings.ok(f"the control group allows {there:g} of them")
    except (OSError, ValueError):
        pass
    if config.data.source in IN_MEMORY:
        findings.ok(f"{config.data.source} needs none to decode")
        return
    rate = decoded_per_second(config)
    findings.ok(f"one decodes and crops {rate:,.0f} images/s (measured, JPEGs of 400x350)")
    if images_per_second is None:
        findings.ok("how many a run needs is not known; give --images-per-second")
        return
    wanted = images_per_second * max(devices, 1)
    needed = wanted / rate
    told = f"{wanted:,.0f} images/s want {needed:.1f} of them"
    if needed > there:
        findings.warn(told, "a run will wait for images: take more cores, or a process on more hosts (docs/data.md)")
    else:
        findings.ok(told)


def decoded_per_second(config: Config) -> float:
    """Images a second that one core decodes and crops as the recipe does."""
    import numpy as np

    from jaxdp.bench.input import make_images
    from jaxdp.data.decode import Scratch, decode
    from jaxdp.data.sources import training_shape

    shape, side = training_shape(config)
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), 8)
        encoded = [path.read_bytes() for path in sorted(Path(folder).rglob("*.jpg"))]
    scratch, row = Scratch(), np.empty((side, side, 3), np.uint8)
    done, began = 0, None
    while began is None or time.thread_time() - began < MEASURED_SECONDS:
        for data in encoded:
            shape(decode(data, scratch), row, done)
        if began is None:  # the first round is not counted
            began = time.thread_time()
        else:
            done += len(encoded)
    return done / (time.thread_time() - began)


def _existing(path: Path) -> Path:
    """The nearest directory above that is there."""
    path = path.expanduser().absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _space(path: Path) -> tuple[int, bool, Path]:
    """(free bytes, whether it can be written, the directory that is there)."""
    there = _existing(path)
    return shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK) and there.is_dir(), there


def disk(findings: Findings, config: Config, workdir: Path, state_bytes: int | None) -> None:
    """Space for the checkpoints of the recipe in the working directory, and for temporary files."""
    free, writable, there = _space(workdir)
    told = f"{size(free)} free for {workdir}"
    if not writable:
        findings.wrong(f"{there} cannot be written", "give another --workdir, or the right to write there")
    elif state_bytes is None:
        findings.ok(f"{told}; what checkpoints take is not known")
    else:
        count = config.checkpoint.keep + 2  # the best one, and the one being written
        told += f"; {count} checkpoints take {size(count * state_bytes)}"
        if count * state_bytes > free:
            findings.wrong(told, "free space, give another --workdir, or a smaller --checkpoint.keep")
        else:
            findings.ok(told)
    temporary, asked = Path(tempfile.gettempdir()), os.environ.get("TMPDIR")
    if asked and Path(asked).absolute() != temporary.absolute():
        mend = "make it, free space there, or set TMPDIR to another directory"
        findings.warn(f"TMPDIR={asked} cannot be written, and {temporary} is used instead", mend)
    free, writable, _ = _space(temporary)
    if free < SPARE_BYTES:
        findings.warn(f"{size(free)} free for temporary files in {temporary}", "free space there, or set TMPDIR")
    else:
        findings.ok(f"{size(free)} for temporary files in {temporary}")


def cache(findings: Findings, config: Config) -> None:
    """The directory of compiled programs."""
    asked = config.compile.cache
    if asked == "off":
        findings.ok("off: every run compiles anew")
        return
    told = os.environ.get("JAX_COMPILATION_CACHE_DIR") if asked == "auto" else None
    try:
        path = Path(told) if told else compilation.cache_directory(asked)
    except RuntimeError:  # no home directory
        findings.warn("there is no home directory for it", "set HOME, XDG_CACHE_HOME or --compile.cache")
        return
    free, writable, there = _space(path)
    if not writable:
        say = findings.warn if asked == "auto" else findings.wrong
        say(f"{path} cannot be written ({there})", "every run compiles anew; give a directory by --compile.cache")
        return
    files = [one.stat().st_size for one in path.rglob("*") if one.is_file()] if path.is_dir() else []
    findings.ok(f"{path}: {len(files):,} files, {size(sum(files))}")
    if free < SPARE_BYTES:
        mend = f"{'empty it' if files else 'free space there'}, or give another directory by --compile.cache"
        findings.warn(f"{size(free)} free there", mend)
    else:
        findings.ok(f"{size(free)} free there")


def limits(findings: Findings) -> None:
    """How many files may be open; a run raises the soft limit by itself, up to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = ", at most ".join("unlimited" if one == resource.RLIM_INFINITY else f"{one:,}" for one in (soft, hard))
    if hard != resource.RLIM_INFINITY and hard < FILES:
        findings.warn(
            f"{told}; a large prepared data set opens up to {FILES:,}", f"let the system allow {FILES:,} (ulimit -Hn)"
        )
    else:
        findings.ok(told)


def shared_memory(findings: Findings, gpus: int) -> None:
    """/dev/shm, through which GPUs of one host exchange where no faster way is there."""
    place = Path("/dev/shm")
    if not place.is_dir():
        say = findings.warn if gpus > 1 else (lambda found, mend: findings.ok(found))
        say("there is no /dev/shm", "mount a tmpfs there: NCCL uses it between processes of a host")
        return
    free = shutil.disk_usage(place).free
    if gpus > 1 and free < SHARED_BYTES:
        findings.warn(f"{size(free)} free in /dev/shm", "give the container more, as by docker run --shm-size 8g")
    else:
        findings.ok(f"{size(free)} free in /dev/shm")
