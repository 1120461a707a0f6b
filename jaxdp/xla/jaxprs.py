"""Jaxprs that contain other jaxprs."""

from collections.abc import Iterator
from typing import Any


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds: of a scan, a call, the branches of a cond."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner
