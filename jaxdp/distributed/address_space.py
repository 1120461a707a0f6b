"""The limit of a process's address space (`ulimit -v`), below which native libraries abort or deadlock."""

import ctypes
import os
import resource

from jaxdp.errors import ConfigError, first_line

# Measured with the smallest run, JAX 0.10.2 on Linux: what Python and the libraries map, and the threads and buffers of a core.
# One core ran in 1,024 MiB and failed in 960; two ran in 1,200 and failed in 1,152. More than four cores were not measured.
BASE_BYTES, CORE_BYTES, MAX_CORES = 770 * 2**20, 170 * 2**20, 4
M_ARENA_MAX = -8  # of glibc's malloc.h


def limit() -> int | None:
    """The limit of this process's address space in bytes; None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def check() -> None:
    """Raise ConfigError for a limit that is too low for any run. Called before JAX is imported.

    Below a limit that suffices, all threads share one heap, because glibc would reserve 64 MiB for each.
    """
    if (available := limit()) is None:
        return
    cores = len(os.sched_getaffinity(0))
    required = BASE_BYTES + CORE_BYTES * min(cores, MAX_CORES)
    if available < required:
        raise ConfigError(
            "ulimit -v",
            available // 1024,
            reason=f"the libraries need at least {required // 1024} KiB of address space on {cores} cores",
            hint="raise the limit, or limit memory by a cgroup instead",
        )
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_ARENA_MAX, 1)


def out_of_memory_message(error: BaseException) -> str:
    """One line for an error from lack of memory or threads, with the limits of this process."""
    reason = first_line(error) if str(error) else "out of memory"
    limits = [f"address space {available:,} bytes (ulimit -v)"] if (available := limit()) is not None else []
    threads, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits += [f"{threads:,} threads (ulimit -u)"] * (threads != resource.RLIM_INFINITY)
    return f"{reason}; limits: {', '.join(limits) or 'the memory of the machine or its cgroup'}"
