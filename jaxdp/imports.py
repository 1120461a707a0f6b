"""Where an exception comes from: a package that cannot be imported, or a place in the user's code."""

import os
import traceback

LIBRARIES = {"jax", "jaxlib", "flax", "jaxdp", "contextlib", "functools"}  # an error is located in the code that calls them


def not_imported(error: BaseException) -> str | None:
    """The package that is missing or that failed while being imported; None for any other error."""
    missing = [error.name] if isinstance(error, ImportError) and error.name else []
    packages = [name.split(".")[0] for name in missing + _modules_being_imported(error)]
    return next((name for name in packages if name != "jaxdp"), None)


def _modules_being_imported(error: BaseException) -> list[str]:
    """The modules that were being imported when the error was raised, innermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = (frame.f_globals.get("__name__") for frame in reversed(frames) if frame.f_code.co_name == "<module>")
    return [name for name in modules if name]


def place_in_user_code(error: BaseException) -> str:
    """ " at FILE:LINE", the innermost place in a traceback that is neither jaxdp's nor of `LIBRARIES`; "" if there is none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if frame.f_globals.get("__name__", "").split(".")[0] not in LIBRARIES]
    return f" at {os.path.basename(own[-1].f_code.co_filename)}:{own[-1].f_lineno}" if own else ""
