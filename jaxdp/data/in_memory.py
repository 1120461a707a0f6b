"""Decoded images in memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxdp.data.loader import ItemSource


class ArraySource:
    """Images and labels in memory. images: uint8 [N, H, W, 3]; labels: int32 [N]; bad_images: see `DecodedImages`.

    source: the items, in the same order, of which the images were decoded.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        bad_images: Mapping[str, str] | None = None,
        *,
        source: "ItemSource | None" = None,
    ) -> None:
        self.source = source
        self.images = np.ascontiguousarray(images, np.uint8)
        self.labels = np.ascontiguousarray(labels, np.int32)
        self.bad_images = dict(bad_images or {})

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        return self.images[index], self.labels[index]

    def batch(self, indices: np.ndarray, positions: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(images [B, H, W, 3] uint8, labels [B] int32), freshly allocated; positions have no effect."""
        return self.images[indices], self.labels[indices]
