"""Memory of this process: the limit of its address space, and the memory that the C library keeps.

The activations of a step are one block, allocated when the step begins and freed when it ends. By default the C library returns
a block of that size to the system at once, and the system clears every page again in the next step. malloc can be configured to
keep freed memory of the main thread, but other threads have arenas of at most 64 MB each. So the step of a single device runs
in the main thread; several devices have threads, and their memory is returned.
"""

import ctypes
import os
import resource

from jaxdp.errors import ConfigError, first_line

# Measured with the smallest run, JAX 0.10.2 on Linux: what Python and the libraries map, and the threads and buffers of a core.
# One core ran in 1,024 MiB and failed in 960; two ran in 1,200 and failed in 1,152. More than four cores were not measured.
BASE_BYTES, CORE_BYTES, MAX_CORES = 770 * 2**20, 170 * 2**20, 4
# mallopt(3): parameters of glibc by their numbers in malloc.h, with their values.
ONE_ARENA, TRIM_THRESHOLD, MMAP_MAX = (-8, 1), (-1, 2**31 - 1), (-4, 0)


def address_space_limit() -> int | None:
    """The limit of this process's address space (`ulimit -v`) in bytes; None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def check_address_space() -> None:
    """Raise ConfigError for a limit below which native libraries abort or deadlock. Called before JAX is imported.

    Below a limit that suffices, all threads share one heap, because glibc would reserve 64 MiB for each.
    """
    if (available := address_space_limit()) is None:
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
    _configure_malloc(ONE_ARENA)


def out_of_memory_message(error: BaseException) -> str:
    """One line for an error from lack of memory or threads, with the limits of this process."""
    reason = first_line(error) if str(error) else "out of memory"
    available = address_space_limit()
    limits = [f"address space {available:,} bytes (ulimit -v)"] if available is not None else []
    threads, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits += [f"{threads:,} threads (ulimit -u)"] * (threads != resource.RLIM_INFINITY)
    return f"{reason}; limits: {', '.join(limits) or 'the memory of the machine or its cgroup'}"


def keep_freed() -> None:
    """Keep freed memory in this process, which then holds the most it ever used."""
    _configure_malloc(TRIM_THRESHOLD, MMAP_MAX)


def _configure_malloc(*parameters: tuple[int, int]) -> None:
    """Set parameters of glibc's malloc. Without glibc, nothing happens."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for number, value in parameters:
            mallopt(number, value)
