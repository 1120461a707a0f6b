"""What linen and nnx modules share: stages, arguments of `__call__`, and the moments of `BatchNorm`."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

ROOT = "net"  # first part of every parameter's name
MODE_ARGUMENTS = {"train": True, "training": True, "deterministic": False, "use_running_average": False}
"""Parameters of a module's `__call__` -> their value in training; evaluation passes the opposite."""

Path = tuple[str, ...]


class UnusableModule(Exception):
    """A module that cannot be trained: reason, and a hint."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


def mode_arguments(call: Callable, train: bool) -> dict[str, bool]:
    """The keyword arguments for a module's `__call__`. Raises UnusableModule if it requires any others but images and rngs."""
    _, *others = inspect.signature(call).parameters.values()
    known = {name: value == train for name, value in MODE_ARGUMENTS.items()}
    empty = inspect.Parameter.empty
    for one in others:
        named = one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if named and one.default is empty and one.name not in (*known, "rngs"):
            raise UnusableModule(
                f"__call__ of the module requires {one.name!r}",
                f"take images alone, or with {', '.join(known)}; give other parameters a default",
            )
    return {one.name: known[one.name] for one in others if one.name in known}


def declares_stages(module: Any) -> bool:
    """Whether the module's class has a method `stages`; an attribute of that name declares nothing."""
    return inspect.isfunction(getattr(type(module), "stages", None))


def check_stages(paths: Iterable[Path | None]) -> tuple[Path, ...]:
    """The paths of the modules that `stages()` returned. None: not a submodule. Raises UnusableModule."""
    checked: list[Path] = []
    for path in paths:
        number = len(checked) + 1
        if not path:
            raise UnusableModule(f"item {number} of stages() is not a submodule", "return submodules, in forward order")
        for other in checked:
            shorter = min(len(path), len(other))
            if path[:shorter] == other[:shorter]:
                raise UnusableModule(
                    f"stages() returns {'/'.join(path)} beside {'/'.join(other)}", "return every submodule once"
                )
        checked.append(path)
    if not checked:
        raise UnusableModule("stages() returns nothing", "return submodules, in forward order")
    return tuple(checked)


def name_of(path: Path) -> str:
    """The name of a stage in the trees of the state."""
    return "/".join((ROOT, *path))


def segments_of(paths: tuple[Path, ...]) -> tuple[tuple[str, ...], ...]:
    """The segments of a network with these stages; see `jaxdp.models.Model`."""
    return tuple((name_of(path),) for path in paths)


def split_by_stage(tree: Mapping, paths: tuple[Path, ...]) -> dict[str, Any]:
    """A tree of nested dicts as {name of a stage: its part}. Parts without leaves are {}.

    Raises UnusableModule for a leaf outside all stages.
    """
    parts = {name_of(path): _subtree(tree, path) for path in paths}
    inside = sum(len(jax.tree.leaves(part)) for part in parts.values())
    leaves = jax.tree.leaves_with_path(tree)
    if inside != len(leaves):
        names = [tuple(str(key.key) for key in path) for path, _ in leaves]
        outside = next(name for name in names if not any(name[: len(path)] == path for path in paths))
        raise UnusableModule(f"{'/'.join(outside)} belongs to no stage", "move it into a submodule that stages() returns")
    return parts


def join_stages(parts: Mapping[str, Any], paths: Iterable[Path]) -> dict[str, Any]:
    """The inverse of `split_by_stage`, for the stages that are there."""
    joined = {path: parts[name_of(path)] for path in paths if parts.get(name_of(path))}
    return dict(joined[()]) if () in joined else nest(joined)


def _subtree(tree: Mapping, path: Path) -> Any:
    for key in path:
        tree = tree.get(key, {})
    return tree


def nest(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """Nested dicts of the leaves by path."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def without_empty(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that have leaves."""
    return {name: part for name, part in parts.items() if jax.tree.leaves(part)}


def moments_of(statistics: Mapping) -> dict[str, Any]:
    """{"mean", "square"} of every BatchNorm layer, from the {"mean", "var"} of one batch."""
    if "mean" not in statistics:
        return {name: moments_of(part) for name, part in statistics.items()}
    mean, var = statistics["mean"], statistics["var"]
    return {"mean": mean, "square": var + mean * mean}


def foreign_statistics(name: str) -> UnusableModule:
    """The error for a batch statistic that no BatchNorm layer of Flax owns."""
    return UnusableModule(
        f"the batch statistic {name} is not of Flax's BatchNorm, the only layer whose statistics jaxdp averages over workers",
        "use BatchNorm, or register an object with init and apply that returns moments",
    )
