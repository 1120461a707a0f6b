"""Batches of any data set on a mesh, for programs that are not jaxdp's: an iterator whose state resumes exactly."""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdp.choices import TASKS
from jaxdp.config import MAX_CLASSES
from jaxdp.data.batch_sources import ArraySource, DecodedImages
from jaxdp.data.from_python import ArrayItems, as_source
from jaxdp.data.host_crops import center_crop
from jaxdp.data.prefetch import BatchSource, DeviceIterator
from jaxdp.data.synthetic import SyntheticSource
from jaxdp.errors import ConfigError, kind_of
from jaxdp.parallel.mesh import AXES, make_mesh
from jaxdp.targets import own_target


class Loader(Iterator[dict[str, jax.Array]]):
    """Shuffled batches, loaded in the background and placed on the devices: {"images", "labels", "positions"}.

    images: [B, S, S, 3] uint8; labels: [B] int32; positions: [B] uint32, samples seen before each. Rows are sharded over all
    devices of the mesh, and each process loads the rows of its own devices. The order depends on `seed` and position alone:
    every epoch is a new permutation, and batches continue across its end.

    dataset: arrays (images [N, H, W, 3] uint8, labels [N]); an object with __len__ and __getitem__ -> (image, label), image as
    uint8 pixels, a Pillow image or encoded bytes; or a data set of `open_datasets`, with its crops and sizes.
    batch: images in a batch, of all devices. mesh: default `make_mesh()`. start: samples seen before the first batch. end: the
    iterator ends with the batch that reaches so many samples (None: never). image_size: images are resized to a center square
    with this side, in pixels; required for objects. task: a registered one, whose targets take the place of the labels; several
    labels for each image, [N, C], need no name, but come from arrays.

    `get_state` and `set_state` work as in Grain. Use it in a `with` block, or close it when done.
    Raises ConfigError for a batch that the devices cannot share, or a data set that is none of these.
    """

    def __init__(
        self,
        dataset: Any,
        batch: int,
        *,
        mesh: Mesh | None = None,
        seed: int = 0,
        start: int = 0,
        end: int | None = None,
        image_size: int | None = None,
        task: str = "classes",
    ) -> None:
        self.source, self.mesh = _as_batches(dataset, image_size, task), mesh or make_mesh()
        if self.mesh.axis_names != AXES:
            raise ConfigError("mesh", self.mesh.axis_names, reason=f"must have the axes {AXES}", hint="use jaxdp.make_mesh")
        for field, value, least in (("batch", batch, 1), ("seed", seed, 0), ("start", start, 0), ("end", end or 0, 0)):
            _check_count(field, value, least=least)
        if batch % self.mesh.size:
            reason = f"cannot be divided among {self.mesh.size} devices"
            raise ConfigError("batch", batch, reason=reason, hint=f"use a multiple of {self.mesh.size}")
        self.batch, self.seed, self.end = batch, seed, sys.maxsize if end is None else end
        self._open(start)

    def _open(self, start: int) -> None:
        self.samples, self.closed = start, False
        self.batches = DeviceIterator(
            self.source, self.mesh, seed=self.seed, first=start, end=self.end, global_batch=self.batch
        )

    def __next__(self) -> dict[str, jax.Array]:
        """The next batch; raises what reading it raised, and then reads the same batch again at the next call."""
        try:
            loaded = self.batches.next()
        except BaseException:
            if not self.closed:
                self.batches.close()
                self._open(self.samples)
            raise
        if loaded is None:
            raise StopIteration
        self.samples += self.batch
        return loaded

    def get_state(self) -> dict[str, int]:
        """{"samples": seen so far, "seed", "examples"}: what `set_state` needs to continue behind the last batch."""
        return {"samples": self.samples, "seed": self.seed, "examples": len(self.source)}

    def set_state(self, state: dict[str, int]) -> None:
        """Continue where `get_state` was called, with this or another batch size, on any number of devices.

        state: numbers, or arrays without dimensions, as a checkpoint may restore them.

        Raises ConfigError for a state of another seed or data set, whose order is another.
        """
        if not isinstance(state, dict) or not {"samples", "seed", "examples"} <= state.keys():
            reason = f"{kind_of(state)} without samples, seed and examples" if isinstance(state, dict) else kind_of(state)
            raise ConfigError("state", reason=f"{reason} is no state of a loader", hint="give what get_state returned")
        state = {name: np.asarray(value).item() if np.ndim(value) == 0 else value for name, value in state.items()}
        for name, own in (("seed", self.seed), ("examples", len(self.source))):
            if state[name] != own:
                reason = f"the state of the loader has {name}={state[name]}, this loader {own}"
                raise ConfigError("state", reason=reason, hint="open the loader with the seed and the data of the state")
        _check_count("samples", state["samples"], least=0)
        self.close()
        self._open(state["samples"])

    def close(self) -> None:
        """Stop loading."""
        self.closed = True
        self.batches.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_count(field: str, value: object, *, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or not least <= value < 2**63:
        raise ConfigError(field, value, reason=f"must be a whole number, at least {least} and below 2**63")


def _as_batches(dataset: Any, image_size: int | None, task: str) -> BatchSource:
    """The data set as a source of batches of one image size."""
    if isinstance(dataset, (ArraySource, DecodedImages, SyntheticSource)):  # of `open_datasets`
        return dataset
    if image_size is not None:
        _check_count("image_size", image_size, least=1)
    TASKS.check(task)
    target = own_target(task)
    items = as_source(dataset, "training", target)
    if hasattr(items, "__len__") and not len(items):
        raise ConfigError("dataset", reason="it has no images")
    if isinstance(items, ArrayItems) and image_size is None:
        images = items.images.reshape(*items.images.shape[:3], -1)  # [N, H, W, 1 or 3]
        return ArraySource(np.broadcast_to(images, (*images.shape[:3], 3)), items.labels)
    if not hasattr(items, "__getitem__") or not hasattr(items, "__len__"):
        hint = "give arrays (images, labels), or an object with __len__ and __getitem__"
        raise ConfigError("dataset", reason=f"{kind_of(dataset)} is no data set", hint=hint)
    if image_size is None:
        hint = "give the side in pixels, such as image_size=224"
        raise ConfigError("image_size", None, reason="required for images of any size", hint=hint)

    def crop(pixels: np.ndarray, out: np.ndarray, _: int) -> None:
        center_crop(pixels, out, image_size)

    return DecodedImages(items, transform=crop, size=image_size, target=target or MAX_CLASSES)
