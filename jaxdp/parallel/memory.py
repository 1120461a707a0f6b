"""The memory of a process that computes on its CPU.

A step's activations are allocated when it begins and freed when it ends. The C library gives blocks of that size back to the
system at once, which clears every page anew when the next step touches it. Told to keep them it does so in heaps: the main
thread's without bound, those of other threads of up to HEAP bytes each. So a single device computes in the main thread, and of
several, which have threads of their own, a step's memory comes in blocks of BLOCK bytes (an option of `compilation`).
"""

import ctypes

HEAP, BLOCK = 2**26, 2**25
# mallopt(3): glibc's parameters by their numbers in malloc.h, and what they are set to.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = (-1, 2**31 - 1), (-2, HEAP), (-4, 0)


def keep_freed() -> bool:
    """Let freed memory stay with this process, which then holds the most that it ever needed; False where there is no glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*one) for one in (TRIM_THRESHOLD, TOP_PAD, MMAP_MAX)])
