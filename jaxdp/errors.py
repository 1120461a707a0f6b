"""What every part needs to tell a person, and a launcher, of an error."""

EXIT_FAILURE, EXIT_CONFIG, EXIT_STOPPED = 1, 2, 75  # exit codes: stopped is asked to stop, with all saved


class OneLine:
    """Mixin of exceptions whose message says all: a notebook shows it without the traceback.

    The method is IPython's protocol for exceptions that render themselves; elsewhere nobody calls it.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """The first line of an error's message; where it has none, `otherwise` or the error's name."""
    return (str(error).splitlines() or [otherwise or type(error).__name__])[0]
