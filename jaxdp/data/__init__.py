"""Data sources, decoding, augmentation, sample order and prefetching to the devices.

`Loader` and `open_datasets` are public; they are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp.data.loader import Loader as Loader
    from jaxdp.data.sources import open_datasets as open_datasets

_MODULE_OF = {
    "Loader": "jaxdp.data.loader",
    "open_datasets": "jaxdp.data.sources",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jaxdp.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
