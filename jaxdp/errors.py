"""What every part needs to tell a person, and a launcher, of an error."""

import traceback

EXIT_FAILURE, EXIT_CONFIG, EXIT_STOPPED = 1, 2, 75  # exit codes: stopped is asked to stop, with all saved


class OneLine:
    """Mixin of exceptions whose message says all: a notebook and the command line show it without the traceback.

    exit_code: of a command that ends with it. The method is IPython's protocol for exceptions that render themselves; elsewhere
    nobody calls it.
    """

    exit_code = EXIT_FAILURE

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class ConfigError(OneLine, ValueError):
    """The configuration cannot be run: one line with the field, the value, what is allowed and what to do."""

    exit_code = EXIT_CONFIG


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """The first line of an error's message; where it has none, `otherwise` or the error's name."""
    return (str(error).splitlines() or [otherwise or type(error).__name__])[0]


def not_imported(error: BaseException) -> str | None:
    """The package that is missing, or whose own import has raised an error; None where the error is of another kind."""
    missing = [error.name] if isinstance(error, ImportError) and error.name else []
    packages = [name.split(".")[0] for name in missing + _begun(error)]
    return next((name for name in packages if name != "jaxdp"), None)


def _begun(error: BaseException) -> list[str]:
    """The modules whose import had begun where an error was raised, the innermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame.f_globals["__name__"] for frame in reversed(frames) if frame.f_code.co_name == "<module>"]
