"""What every part needs to tell a person of an error in one line."""


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """The first line of an error's message; where it has none, `otherwise` or the error's name."""
    return (str(error).splitlines() or [otherwise or type(error).__name__])[0]
