"""Memory of a process whose device is its CPU.

The activations of a step are one block, allocated when the step begins and freed when it ends. By default the C library returns
a block of that size to the system at once, and the system clears every page again in the next step. malloc can be configured to
keep freed memory of the main thread, but other threads have arenas of at most 64 MB each. So the step of a single device runs
in the main thread; several devices have threads, and their memory is returned.
"""

import ctypes

# mallopt(3): parameters of glibc by their numbers in malloc.h, with their values.
TRIM_THRESHOLD, MMAP_MAX = (-1, 2**31 - 1), (-4, 0)


def keep_freed() -> None:
    """Keep freed memory in this process, which then holds the most it ever used. Without glibc, nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(*TRIM_THRESHOLD)
        mallopt(*MMAP_MAX)
