"""Size of the chunks of images that travel to the devices; `jaxdp plan` and the prefetcher share it."""

from jaxdp.config import Data

AHEAD_BYTES = 2**31  # host memory of prefetched images: 14,000 of 224x224, and little of a server's
PREFETCH_DEPTH = 2  # chunks held on the host in addition to the one being transferred


def rows_per_chunk(rows: int, *, devices: int, image_bytes: int) -> int:
    """Images per device and chunk: the largest divisor of `rows` that lets all chunks on the host fit in AHEAD_BYTES, or 1.

    rows: images of a batch on each device; devices: of this host; image_bytes: size of one image.
    """
    bytes_per_row = (PREFETCH_DEPTH + 1) * devices * image_bytes
    return max((n for n in range(1, rows + 1) if rows % n == 0 and n * bytes_per_row <= AHEAD_BYTES), default=1)


def image_bytes(data: Data) -> int:
    """Bytes of one image as transferred to a device."""
    return 3 * (data.stored_size or data.image_size) ** 2
