"""The memory of a process whose device is its CPU.

A step's activations are one block, allocated when it begins and freed when it ends. The C library gives a block of that size
back to the system at once, which clears every page anew when the next step touches it. What the main thread allocates it can be
told to keep; threads have heaps of their own, of 64 MB at most. So the step of a single device runs in the main thread; several
devices have threads, and their memory goes back.
"""

import ctypes

# mallopt(3): glibc's parameters by their numbers in malloc.h, and what they are set to.
TRIM_THRESHOLD, MMAP_MAX = (-1, 2**31 - 1), (-4, 0)


def keep_freed() -> None:
    """Let freed memory stay with this process, which then holds the most it ever needed; without glibc nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(*TRIM_THRESHOLD)
        mallopt(*MMAP_MAX)
