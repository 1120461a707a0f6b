"""Progress of reading data. A run that watches itself listens, to tell slow storage from a source that is stuck."""

from collections.abc import Callable

listener: Callable[[], None] | None = None


def report() -> None:
    """Say that a part of the data has been read, or that a request is repeated. Any thread may call this."""
    if listener:
        listener()
