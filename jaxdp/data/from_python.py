"""Data sets that a user gives from Python: arrays, or objects with items."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp.config import MAX_CLASSES, Config
from jaxdp.data.batch_sources import ItemSource
from jaxdp.data.datasets import HOLDOUT_HINT, Datasets, Source, decode_items, stated_classes
from jaxdp.data.held_out import divide, has_held_out
from jaxdp.data.image_folder import normalized
from jaxdp.errors import ConfigError, first_line, place_in_user_code
from jaxdp.targets import BadTarget, Target, own_target

GIVEN = "given"  # the name of the source


class ArrayItems:
    """Images and labels of the caller, without a copy.

    images: uint8 [N, H, W] or [N, H, W, 1 or 3]; labels: integers from 0, or booleans, [N]; or [N, C], each 0 or 1.
    classes: the largest label plus one, or C; or the names of the classes. weights: if given, [N] of `data.sampling`.
    """

    weights: Any

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels
        self.classes: Any = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1 if labels.size else 0
        self.warnings: list[str] = []

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        return self.images[index], self.labels[index]


class TargetItems(ArrayItems):
    """The same with targets of a registered task, as `Target` has them."""

    classes = 0

    def __init__(self, images: np.ndarray, targets: np.ndarray) -> None:
        self.images, self.labels, self.warnings = images, targets, []


class Given(Source):
    """Data from Python. make: the function of `jaxdp.register_dataset`; None for the `datasets` argument of `jaxdp.train`."""

    def __init__(self, make: Callable | None = None) -> None:
        self.make = make

    def size(self, config: Config) -> tuple[int, int | None]:
        train, evaluation = self._pair(config)
        return len(train), max(stated_classes(train) or 0, stated_classes(evaluation) or 0) or None

    def open(self, config: Config, *, may_lack_classes: bool, trained: Sequence[str] | None) -> Datasets:
        source = config.data.source
        return open_pair(config, self._pair(config), may_lack_classes=may_lack_classes, trained=trained, source=source)

    def splits(self, config: Config) -> Sequence[tuple[str, ItemSource]]:
        train, evaluation = self._pair(config)
        return [(config.data.train_split, train), (config.data.eval_split or "evaluation", evaluation)]

    def _pair(self, config: Config) -> tuple[ItemSource, ItemSource]:
        """The training and the evaluation images. Raises ConfigError if they are missing, and for an error of the function."""
        if self.make is None:  # a config alone does not have them
            hint = "pass them in Python: jaxdp.train(config, workdir, datasets=(training, evaluation))"
            raise ConfigError("data.source", GIVEN, reason="the images are given from Python", hint=hint)
        try:
            return check_pair(self.make(config.data), config)
        except ConfigError:
            raise
        except Exception as error:
            reason = f"its function fails{place_in_user_code(error)}: {type(error).__name__}: {first_line(error)}"
            hint = "it is called with the config's `data` section and returns (training, evaluation)"
            raise ConfigError("data.source", config.data.source, reason=reason, hint=hint) from error


def open_pair(
    config: Config,
    pair: Sequence[Any],
    *,
    may_lack_classes: bool = False,
    trained: Sequence[str] | None = None,
    source: str = GIVEN,
) -> Datasets:
    """Data sets of (training, evaluation) items from Python; see `Source.open`. source: name of their data source."""
    train, evaluation = check_pair(pair, config)
    return decode_items(config, train, evaluation, source=source, may_lack_classes=may_lack_classes, trained=trained)


def check_pair(pair: Any, config: Config) -> tuple[ItemSource, ItemSource]:
    """The training and the evaluation items; of a pair (training, None) they are parts of the first, by `data.holdout`.

    Raises ConfigError for anything but a pair of arrays or of objects with items, and for a pair that needs no division.
    """
    target, items = own_target(config.task), tuple(pair) if isinstance(pair, (tuple, list)) else ()
    if is_alone := len(items) == 2 and items[1] is None:
        items = (items[0], items[0])
    if is_alone and not config.data.holdout:
        raise ConfigError("datasets", reason="have no evaluation images", hint=f"give some in place of None, or {HOLDOUT_HINT}")
    pairs = "give ((images, labels), (evaluation_images, evaluation_labels))"
    if len(items) == 2 and all(hasattr(item, "ndim") for item in items):
        raise ConfigError("datasets", reason="are two arrays, not two data sets", hint=pairs)
    if len(items) != 2 or not all(hasattr(source, "__len__") and hasattr(source, "__getitem__") for source in items):
        reason = "must be a pair (training, evaluation) of arrays (images, labels) or of objects with __len__ and __getitem__"
        raise ConfigError("datasets", reason=reason, hint=pairs)
    training = as_source(items[0], "training", target)
    if is_alone:
        return divide(training, training, config)
    if config.data.holdout:
        raise has_held_out(config, "images of the pair")
    return training, as_source(items[1], "evaluation", target)


def as_source(item: Any, name: str, target: Target | None = None) -> ItemSource:
    """A source of arrays (images, labels, names of the classes or None, weights), without the last ones too; any other object
    unchanged.

    target: of a registered task, whose labels may be a mapping of arrays.

    Raises ConfigError as `_array_items` and `with_names`, and for a name that stands there twice.
    """
    if not (isinstance(item, (tuple, list)) and len(item) in (2, 3, 4) and getattr(item[0], "ndim", 0) >= 3):
        return item
    items = _array_items(np.asarray(item[0]), item[1], name, target=target)
    if len(item) == 4:
        items.weights = item[3]
    if len(item) == 2 or item[2] is None:
        return items
    names = [str(one) for one in item[2]]
    texts = list(map(normalized, names))
    if repeated := [text for text in texts if texts.count(text) > 1]:
        raise ConfigError("datasets", reason=f"{name} names two classes {repeated[0]!r}", hint="give each its own name")
    return with_names(items, names, name)


def _array_items(images: np.ndarray, labels: Any, name: str, *, target: Target | None) -> ArrayItems:
    """The items of images and labels. Raises ConfigError for other shapes and types than `ArrayItems` has, and wrong labels."""
    if images.dtype != np.uint8 or images.ndim > 4 or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        hint = "give uint8 pixels from 0 to 255 of shape [N, H, W, 3], [N, H, W, 1] or [N, H, W]"
        raise ConfigError("datasets", reason=f"{name} images are {images.dtype} of shape {images.shape}", hint=hint)
    if target is not None:
        try:
            return TargetItems(images, target.all_of(labels, len(images)))
        except BadTarget as error:
            reason = f"the target of row {error.row} of {name} {error}"
            raise ConfigError("datasets", reason=reason, hint="see `targets` of the registered task") from None
    labels = np.asarray(labels)
    if labels.shape == (len(images), 1):  # as Keras has them
        labels = labels[:, 0]
    if labels.dtype.kind not in "iubf" or labels.ndim not in (1, 2) or len(labels) != len(images):
        hint = f"give whole numbers of shape {images.shape[:1]}, one for each image; or labels of shape [N, C], each 0 or 1"
        raise ConfigError("datasets", reason=f"{name} labels are {labels.dtype} of shape {labels.shape}", hint=hint)
    if labels.ndim == 2:
        return ArrayItems(images, _checked_labels(labels, name))
    wrong = ~((labels >= 0) & (labels < MAX_CLASSES) & (labels == np.trunc(labels)))  # NaN, too
    if wrong.any():
        reason = f"row {(row := wrong.argmax())} of {name} has the label {labels[row]}"
        raise ConfigError("datasets", reason=reason, hint=f"labels are whole numbers from 0 to {MAX_CLASSES - 1:,}")
    items = ArrayItems(images, labels.astype(np.int64) if labels.dtype.kind == "f" else labels)
    if images.size and images[0].max() <= 1 and images.max() == 1:
        items.warnings = [f"all pixels of the {name} images are 0 or 1 of 255, which is nearly black; multiply them by 255"]
    return items


def with_names(items: ArrayItems, names: list[str], name: str) -> ArrayItems:
    """The items with names of their classes. Raises ConfigError if there are fewer than classes, or other than of labels."""
    if items.labels.ndim == 2 and items.classes != len(names):
        reason = f"{name} has {items.classes} labels for each image and {len(names)} class names"
        raise ConfigError("datasets", reason=reason, hint="give as many names as labels")
    if items.classes > len(names):
        reason = f"row {items.labels.argmax()} of {name} has the label {items.classes - 1}"
        raise ConfigError("datasets", reason=reason, hint=f"there are {len(names)} class names, from 0")
    items.classes = names
    return items


def _checked_labels(labels: np.ndarray, name: str) -> np.ndarray:
    """Several labels for each image, float32 [N, C]. Raises ConfigError for a value other than 0 and 1."""
    wrong = ~np.isin(labels, (0, 1))  # NaN, too
    if wrong.any():
        row, column = np.unravel_index(wrong.argmax(), wrong.shape)
        reason = f"row {row} of {name} has the label {labels[row, column]} for class {column}"
        raise ConfigError("datasets", reason=reason, hint="several labels for each image, [N, C], are each 0 or 1")
    return labels.astype(np.float32)
