"""Packages that are missing or broken, from the errors of their imports."""

import traceback


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
