"""The names of classes. Equal names in two sets of images are one class, whatever its label in each of them."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp.data.image_folder import normalized, same_names
from jaxdp.errors import ConfigError

CLASS_NUMBER = r"0|[1-9][0-9]{0,8}"
HINT = "use the classes of the training, with the same names or, if these had none, the same numbers"


def names_of(source: Any) -> tuple[str, ...]:
    """The names that a source states in its attribute `class_names` or `classes`, by label; () where classes have numbers.

    Raises ConfigError for names that differ only in their Unicode form.
    """
    stated = (getattr(source, name, None) for name in ("class_names", "classes"))
    found = (names.tolist() if isinstance(names, np.ndarray) else names for names in stated)
    names: Any = next(filter(None, found), None)
    if not (isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)):
        return ()
    if same := same_names(names):
        reason = f"two names {same[0]!r} differ only in their Unicode form, {same[0]!a} and {same[1]!a}"
        raise ConfigError("class_names", reason=reason, hint="rename one, or merge the classes")
    return tuple(names)


def matching_labels(
    names: Sequence[str], trained: Sequence[str], *, error: Callable[[str, str], ConfigError]
) -> np.ndarray | None:
    """Label in `names` -> label of the class of this name in `trained`, int32 [classes]; None if all are the same.

    A class without a name is named by its number. Raises `error` (reason, hint) for a name that `trained` lacks or has twice,
    and where only one of the two has names.
    """
    own = list(map(normalized, names or map(str, range(len(trained)))))
    if not trained:
        labels = {name: int(name) for name in own if re.fullmatch(CLASS_NUMBER, name)}
    else:
        labels = {normalized(name): label for label, name in enumerate(trained)}
        if own == list(map(normalized, trained)):
            return None
        if len(labels) < len(trained) or len(set(own)) < len(own):
            raise error("several classes have the same name, and their order differs from training", "give each its own name")
    if unknown := [name for name in own if name not in labels]:
        if not names:
            raise error(f"its labels are numbers, but were names in training, such as {trained[0]!r}", HINT)
        why = "a name, but labels were numbers in training"
        if trained:
            why = f"none of the {len(trained)} in training, such as {trained[0]!r}"
        raise error(f"its class {unknown[0]!r} is {why}", HINT)
    found = np.array([labels[name] for name in own], np.int32)
    return None if np.array_equal(found, np.arange(len(found))) else found
