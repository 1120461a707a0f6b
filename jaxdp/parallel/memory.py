"""The memory of a process whose devices are its CPU.

A step's activations are allocated when it begins and freed when it ends. The C library gives blocks of that size back to the
system at once, which clears every page anew when the next step touches it. Kept memory comes
from one arena for all threads, though, for which those that compile have to wait.
"""

import ctypes
import os

# mallopt(3): glibc's parameters by their numbers in malloc.h.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
NEVER = 2**31 - 1
SWITCH = "JAXDP_KEEP_MEMORY"


def keep_if_asked() -> None:
    """`keep_freed`, where the environment has JAXDP_KEEP_MEMORY=on."""
    if os.environ.get(SWITCH) == "on":
        keep_freed()


def keep_freed() -> bool:
    """Let this process use freed memory again, from one arena for all threads; it then holds the most that it ever needed.

    To be called before there are threads, which would have arenas of their own. False where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(name, value) for name, value in ((ARENA_MAX, 1), (MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER))
    )
