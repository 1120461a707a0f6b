"""The memory of a process whose devices are its CPU.

A step's activations are allocated when it begins and freed when it ends. The C library gives blocks of that size back to the
system at once, which clears every page anew when the next step touches it: up to a quarter of a step's time.
"""

import ctypes
import os

# mallopt(3): glibc's parameters by their numbers in malloc.h.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
NEVER = 2**31 - 1
SWITCH = "JAXDP_KEEP_MEMORY"


def keep_freed() -> bool:
    """Let this process use freed memory again, from one arena for all threads; it then holds the most that it ever needed.

    To be called before there are threads, which would have arenas of their own. Nothing is done, and False returned, where the
    C library is not glibc, where its own variables (MALLOC_..., GLIBC_TUNABLES) say what to do, and with JAXDP_KEEP_MEMORY=off.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    told = os.environ.get(SWITCH) == "off" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if mallopt is None or told:
        return False
    return all(mallopt(name, value) for name, value in ((ARENA_MAX, 1), (MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER)))
