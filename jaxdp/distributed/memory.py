"""Memory of this process: how much the C library keeps, and the message when memory runs out.

The activations of a step are one block, allocated when the step begins and freed when it ends. By default the C library returns
a block of this size to the system at once. In the next step, the system clears every page again. malloc can be configured to
keep the main thread's freed memory, but other threads have arenas of at most 64 MB each. So the step of a single device runs in
the main thread. Several devices run in other threads, whose memory is returned.
"""

import ctypes
import resource

from jaxdp.errors import first_line

TRIM_THRESHOLD, MMAP_MAX = (-1, 2**31 - 1), (-4, 0)  # parameters of glibc's mallopt(3) by number, with their values
LIMITS = {
    "address space {:,} bytes (ulimit -v)": resource.RLIMIT_AS,
    "{:,} threads (ulimit -u)": resource.RLIMIT_NPROC,
}


def out_of_memory_message(error: BaseException) -> str:
    """One line for an error from lack of memory or threads, with the limits of this process."""
    reason = first_line(error) if str(error) else "out of memory"
    values = {text: resource.getrlimit(limit)[0] for text, limit in LIMITS.items()}
    limits = [text.format(value) for text, value in values.items() if value != resource.RLIM_INFINITY]
    return f"{reason}; limits: {', '.join(limits) or 'the memory of the machine or its cgroup'}"


def keep_freed() -> None:
    """Keep freed memory in this process, which then holds the most it ever used. Without glibc, nothing happens."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for number, value in (TRIM_THRESHOLD, MMAP_MAX):
            mallopt(number, value)
