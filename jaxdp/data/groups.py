"""How many images travel to the devices at a time: arithmetic that `jaxdp plan` shares with the feed."""

AHEAD = 2  # groups of images on the host beside the one on its way to the devices


def rows_a_group(rows: int, devices: int, image_bytes: int, ahead_bytes: int) -> int:
    """Images of a group on each device: the most that divide a device's `rows` with AHEAD + 1 groups in the bound, or 1."""
    fitting = [n for n in range(1, rows + 1) if rows % n == 0 and (AHEAD + 1) * n * devices * image_bytes <= ahead_bytes]
    return max(fitting, default=1)
