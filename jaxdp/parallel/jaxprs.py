"""Walking a traced program."""


def inside(equation):
    """The jaxprs that an equation of a jaxpr runs: of a loop, a condition, another function."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part


def largest_array(jaxpr) -> int:
    """Bytes of the largest array that any operation makes."""
    largest = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = [largest_array(one) for one in inside(equation)]
        made = [one.aval.size * one.aval.dtype.itemsize for one in equation.outvars]
        largest = max(largest, *(inner or made), 0)
    return largest
