"""Time to report a failure before JAX aborts this process."""

import ctypes
import signal


def delay_abort() -> None:
    """Let a thread that aborts this process sleep for six seconds first, in which the other threads go on.

    JAX aborts a process as soon as it loses rank 0, after a line that does not say why; `FailureHandler.exit` needs a moment to
    name the process that failed. The handler is the C library's `sleep`, whose argument in seconds is the number of the signal:
    signal handlers may call it, and it needs no lock of Python. A handler that is in place, such as faulthandler's, stays.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    previous = library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
    if previous:
        library.signal(signal.SIGABRT, previous)
