"""Chunk sizes for the host memory that a config allows."""

from jaxdp.config import Data
from jaxdp.data import prefetch
from jaxdp.planning import make_plan
from jaxdp.recipes import load_config
from jaxdp.sizes import input_bytes


def test_rows_per_chunk_divide_the_rows_and_fit_the_limit(monkeypatch):
    """A batch of 55,296 images of 320x320 on 8 devices takes 17 GB; three chunks of it fit in 2 GiB."""
    assert prefetch.rows_per_chunk(6912, devices=8, image_bytes=3 * 320**2) == 288
    assert (prefetch.PREFETCH_DEPTH + 1) * 288 * 8 * 3 * 320**2 <= 2**31
    assert prefetch.rows_per_chunk(64, devices=4, image_bytes=3072) == 64
    monkeypatch.setattr(prefetch, "AHEAD_BYTES", 1)
    assert prefetch.rows_per_chunk(64, devices=4, image_bytes=3072) == 1


def test_rows_per_chunk_are_the_largest_divisor_that_fits(monkeypatch):
    image = prefetch.image_bytes(Data(image_size=8))
    assert (image, prefetch.image_bytes(Data(image_size=8, stored_size=10))) == (8 * 8 * 3, 10 * 10 * 3)
    for limit, spare, expected in ((5, 0, 4), (6, 0, 6), (6, -1, 4), (100, 0, 12), (1, 0, 1), (1, -1, 1)):
        monkeypatch.setattr(prefetch, "AHEAD_BYTES", 3 * 2 * image * limit + spare)  # three chunks of two devices
        assert prefetch.rows_per_chunk(12, devices=2, image_bytes=image) == expected


def test_plan_reports_input_memory():
    plan = make_plan(load_config("imagenet_sony_exp2"), examples=1_281_167, devices=8)
    host_and_device = input_bytes(plan)
    assert host_and_device["host"] <= 2**31
    assert host_and_device["device"] == 2 * 6912 * 3 * 320**2
