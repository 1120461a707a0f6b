"""The target of an image as its task has it: its type in batches, and the check of what a source gives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp.choices import TASKS, kind_of_task
from jaxdp.config import Config
from jaxdp.errors import kind_of, plural

INT32 = np.dtype(np.int32)
UNUSABLE = np.iinfo(np.int32).min  # in place of the integers of an image that cannot be used and does not count


class BadTarget(ValueError):
    """What is wrong with targets, as the rest of a sentence. row: of the first such image."""

    def __init__(self, problem: str, row: int = 0) -> None:
        super().__init__(problem)
        self.row = row


@dataclass(frozen=True)
class Target:
    """What the data give for an image. dtype: of one image: float32 or int32 of some shape, or named fields of these."""

    dtype: np.dtype

    @property
    def ignored(self) -> Any:
        """The target of an image that cannot be used and does not count: NaN, or `UNUSABLE`."""
        value = np.zeros(1, self.dtype)
        for part in _parts(value):
            part[...] = np.nan if part.dtype.kind == "f" else UNUSABLE
        return value[0]

    def empty(self, count: int) -> np.ndarray:
        """Room for the targets of `count` images."""
        return np.empty(count, self.dtype)

    def read(self, target: Any) -> Any:
        """The target in a batch. Raises ValueError, whose text follows the target; see `BadTarget`."""
        if getattr(target, "dtype", None) == self.dtype and self.dtype.names:  # of arrays that have been checked
            return target
        return self.all_of(_tree_map(lambda value: as_array(value)[None], target), 1)[0]

    def of_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """The targets of rows of numbers, float64 [N, K], in the order of the fields. Raises BadTarget."""
        names, count = self.dtype.names, len(numbers)
        if numbers.shape[1] != (wanted := len(names) if names else math.prod(self.dtype.shape)):
            raise BadTarget(f"has {plural(numbers.shape[1], 'number')}, and not {wanted}")
        if not names:
            return self.all_of(numbers.reshape(count, *self.dtype.shape), count)
        return self.all_of({name: numbers[:, k] for k, name in enumerate(names)}, count)

    def all_of(self, targets: Any, count: int) -> np.ndarray:
        """The targets of `count` images, given as arrays with leading `count`. Raises BadTarget."""
        found = self.empty(count)
        if self.dtype.names and not (isinstance(targets, Mapping) and {*self.dtype.names} == {*targets}):
            given = f"has {', '.join(map(str, targets))}" if isinstance(targets, Mapping) else f"is {kind_of(targets)}"
            raise BadTarget(f"{given}, and not a mapping with {', '.join(self.dtype.names)}")
        for name, part in zip(self.dtype.names or ("",), _parts(found), strict=True):
            values, of_name = as_array(targets[name] if self.dtype.names else targets), f" as {name!r}" * bool(name)
            if values.shape == (count, 1) and part.ndim == 1:
                values = values[:, 0]
            if values.shape != part.shape or values.dtype.kind not in "iubf":
                one = int(values.shape[:1] == part.shape[:1])  # shapes of one image, unless there are too few or too many
                given = f"{values.dtype} of shape {values.shape[one:]}{of_name}"
                raise BadTarget(f"has {given}, and not {part.dtype} of shape {part.shape[one:]}")
            with np.errstate(over="ignore", invalid="ignore"):
                part[...] = values
            usable = np.isfinite(part) if part.dtype.kind == "f" else (part == values) & (part > UNUSABLE)
            if not usable.all():
                index = np.unravel_index((~usable).argmax(), usable.shape)
                kind = "finite float32" if part.dtype.kind == "f" else "whole number of 32 bits"
                raise BadTarget(f"has {values[index]}{of_name}, and not a {kind}", int(index[0]))
        return found


@dataclass(frozen=True)
class ClassLabel(Target):
    """One class, int32: from 0 to classes - 1. relabel: label of the source -> label in batches; None: the same."""

    dtype: np.dtype = INT32
    classes: int = 0
    relabel: np.ndarray | None = None

    def read(self, target: Any) -> np.int32:
        number = as_array(target)
        if number.size != 1 or number.dtype.kind not in "iub" or not 0 <= number.item() < self.classes:
            raise ValueError(f"is not an integer from 0 to {self.classes - 1}; fix it or the number of classes")
        return np.int32(number.item() if self.relabel is None else self.relabel[int(number.item())])


class LabelVector(Target):
    """Several labels, float32 [classes], each 0 or 1."""

    def read(self, target: Any) -> np.ndarray:
        values, shape = as_array(target), self.dtype.shape
        if values.shape != shape or values.dtype.kind not in "iubf" or not np.isin(values, (0, 1)).all():
            raise ValueError(f"is not an array of {shape[0]} labels, each 0 or 1")
        return values.astype(np.float32)


class NoTarget(Target):
    """The targets do not count: any is read as 0."""

    def read(self, target: Any) -> np.int32:
        return np.int32(0)


def target_of(config: Config, relabel: np.ndarray | None = None) -> Target:
    """What the data of a config give for an image. relabel: see `ClassLabel`."""
    if own := own_target(config.task):
        return own
    classes = config.model.class_count
    if kind_of_task(config.task) == "labels":
        return LabelVector(np.dtype((np.float32, (classes,))))
    return ClassLabel(classes=classes) if relabel is None else ClassLabel(classes=len(relabel), relabel=relabel)


def own_target(task: str) -> Target | None:
    """The target of a registered task that has `targets`; None for any other."""
    targets = TASKS[task].targets
    if targets is None:
        return None
    if isinstance(targets, Mapping):
        return Target(np.dtype([(name, *_type_of(value)) for name, value in targets.items()]))
    return Target(np.dtype(_type_of(targets)))


def own_outputs(task: str) -> int | None:
    """Number of values that a model with one array returns for a registered task with `targets`; None for any other task."""
    own = TASKS[task].own
    if own is None or own.like:
        return None
    return own.outputs or (1 if isinstance(own.targets, Mapping) else max(1, math.prod(own.targets.shape)))


def _type_of(value: Any) -> tuple[type, tuple[int, ...]]:
    return (np.float32 if np.dtype(value.dtype).kind == "f" else np.int32), tuple(value.shape)


def as_array(label: Any) -> np.ndarray:
    """A label as an array; one of no known type for a ragged list, or a tensor that is not in the memory of the host."""
    try:
        return np.asarray(label)
    except Exception:
        return np.array(None)


def _tree_map(function: Any, target: Any) -> Any:
    return {name: function(value) for name, value in target.items()} if isinstance(target, Mapping) else function(target)


def as_tree(targets: Any) -> Any:
    """Targets of a batch as the devices have them: an array, or a dict of them by name."""
    names = None if isinstance(targets, Mapping) else targets.dtype.names
    return {name: np.ascontiguousarray(targets[name]) for name in names} if names else targets


def _parts(targets: np.ndarray) -> list[np.ndarray]:
    """The arrays of `as_tree`, which share its memory."""
    return [targets[name] for name in targets.dtype.names] if targets.dtype.names else [targets]


def counts(targets: np.ndarray) -> np.ndarray:
    """Which targets of a batch belong to images that count, bool [B]."""
    first = _parts(targets)[0].reshape(len(targets), -1)
    return ~(np.isnan(first) if first.dtype.kind == "f" else first == UNUSABLE).any(-1)


def without_ignored(targets: np.ndarray) -> np.ndarray:
    """The targets of a batch with 0 for images that do not count."""
    usable = counts(targets)
    if usable.all():
        return targets
    targets = targets.copy()
    targets[~usable] = np.zeros((), targets.dtype)
    return targets
