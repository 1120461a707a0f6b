"""Batches of decoded images from sources of single items."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.images import encode, folder_config, smooth_image
from PIL import Image

from jaxdp.data import batch_sources, decode, host_crops, progress, sources
from jaxdp.data.batch_sources import ArraySource, DataError, DecodedImages
from jaxdp.targets import UNUSABLE, ClassLabel


def center(image, out, _):
    host_crops.center_crop(image, out, out.shape[0])


def test_batch_depends_on_positions_not_on_threads_or_grouping(pictures):
    one = sources.open_datasets(folder_config(pictures, threads=1)).train
    many = sources.open_datasets(folder_config(pictures, threads=5)).train
    ids, positions = np.array([3, 20, 3, 11, 0, 9]), np.arange(70, 76)
    images, labels = one.batch(ids, positions)
    again, _ = many.batch(ids[2:], positions[2:])
    np.testing.assert_array_equal(images[2:], again)
    np.testing.assert_array_equal(labels, [0, 2, 0, 1, 0, 1])
    assert not np.array_equal(images[0], images[2])  # the same image at another position
    assert not np.shares_memory(images, one.batch(ids, positions)[0])


def test_who_listens_hears_of_every_image_that_is_read(pictures, monkeypatch):
    """Of each one of a batch, so that slow storage is not taken for a source that is stuck."""
    source, heard = sources.open_datasets(folder_config(pictures)).train, []
    source.batch(np.array([3]), np.array([0]))  # without a listener
    monkeypatch.setattr(progress, "listener", lambda: heard.append(1))
    source.batch(np.array([3, 20, 3, 11]), np.arange(4))
    assert len(heard) == 3


def test_copies_of_an_image_in_a_batch_are_read_and_decoded_once(pictures, monkeypatch):
    """As repeated augmentation asks for them: each has the crop that it has alone."""
    source, decoded, read = sources.open_datasets(folder_config(pictures)).train, [], []
    item = source._item
    ids, positions = np.array([3, 20, 3, 11, 3, 20]), np.arange(70, 76)
    alone = [source.batch(ids[n : n + 1], positions[n : n + 1]) for n in range(6)]
    monkeypatch.setattr(batch_sources, "decode", lambda data, scratch: decoded.append(data) or decode.decode(data, scratch))
    monkeypatch.setattr(source, "_item", lambda index: read.append(index) or item(index))
    images, labels = source.batch(ids, positions)
    np.testing.assert_array_equal(images, np.concatenate([batch[0] for batch in alone]))
    np.testing.assert_array_equal(labels, np.concatenate([batch[1] for batch in alone]))
    assert len(decoded) == 3
    assert sorted(read) == [3, 11, 20]


def test_image_damaged_outside_of_its_crop_cannot_be_used(pictures):
    """Whether an image is used does not depend on the crop that a position draws: all of it is decoded."""
    damaged = pictures / "train/dog/4.JPEG"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-40] + bytes(38) + data[-2:])
    source = sources.open_datasets(folder_config(pictures)).train
    message = r"train/dog/4.JPEG cannot be used: damaged or truncated JPEG: .*--data.on-bad-image skip"
    for position in range(8):
        with pytest.raises(DataError, match=message):
            source.batch(np.array([11]), np.array([position]))


def test_every_copy_of_a_damaged_image_is_replaced_or_ignored(pictures):
    (pictures / "train/dog/4.JPEG").write_bytes(b"broken")
    ids, positions = np.array([11, 12, 11]), np.array([5, 6, 7])
    skipping = sources.open_datasets(folder_config(pictures, on_bad_image="skip")).train
    images, labels = skipping.batch(ids, positions)
    np.testing.assert_array_equal(images, skipping.batch(np.array([12, 12, 12]), positions)[0])
    assert labels.tolist() == [1, 1, 1]
    skipping.on_bad_image = "ignore"
    images, labels = skipping.batch(ids, positions)
    assert labels.tolist() == [UNUSABLE, 1, UNUSABLE]
    assert not images[[0, 2]].any()


def test_evaluation_batch_is_center_crop_at_any_position(pictures):
    source = sources.open_datasets(folder_config(pictures)).evaluation
    first, second = source.batch(np.array([4]), np.array([0])), source.batch(np.array([4]), np.array([9]))
    np.testing.assert_array_equal(first[0], second[0])
    out = np.empty((32, 32, 3), np.uint8)
    host_crops.center_crop(decode.decode((pictures / "val/dog/1.JPEG").read_bytes()), out, 37)  # 256 / 224 of 32
    np.testing.assert_array_equal(first[0][0], out)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("shape", [(3, 8, 8), (8, 8, 3), (8, 8, 2), (8, 8, 4), (8,), (8, 8, 3, 1)])
def test_batch_with_pixels_of_another_kind_says_what_to_return(shape, dtype):
    source = DecodedImages([(np.zeros(shape, dtype), 0)], transform=center, size=8, target=2)
    if (shape, dtype) == ((8, 8, 3), np.uint8):
        return
    with pytest.raises(
        DataError, match=rf"{re.escape(str(shape))}; return uint8 \[H, W, 3\], without ToTensor and Normalize; jaxdp norm"
    ):
        source.batch(np.array([0]), np.array([0]))


def test_batch_without_any_good_image_raises_even_if_skipping():
    source = DecodedImages([(b"broken", 0)] * 5, transform=center, size=8, target=2, on_bad_image="skip")
    reasons = "; ".join(["not an image of a known format"] * 3)
    with pytest.raises(DataError, match=f"^no image of the data set can be used; the first reasons: {reasons}$"):
        source.batch(np.array([1]), np.array([0]))


def test_the_image_after_a_damaged_last_one_is_the_first():
    items = [(np.full((4, 4), 9, np.uint8), 1), (np.full((4, 4, 1), 7, np.uint8), True), (b"broken", 0)]
    source = DecodedImages(items, transform=center, size=4, target=2, on_bad_image="skip")
    images, labels = source.batch(np.array([2, 1]), np.array([0, 0]))
    np.testing.assert_array_equal(images[:, 3, 3], [[9] * 3, [7] * 3])
    assert (labels.tolist(), list(source.bad_images)) == ([1, 1], ["image 2"])


@pytest.mark.parametrize("shape", [(1, 9, 3), (9, 1)])
def test_pixels_below_the_smallest_side_cannot_be_used(shape):
    items = [(np.zeros(shape, np.uint8), 0), (np.zeros((2, 2), np.uint8), 0)]
    source = DecodedImages(items, transform=center, size=2, target=1)
    with pytest.raises(DataError, match=rf"image 0 cannot be used: {shape[1]}x{shape[0]} pixels, fewer than 2x2"):
        source.batch(np.array([0]), np.array([0]))
    source.batch(np.array([1]), np.array([0]))


def test_labels_are_those_of_the_run_and_the_share_of_storage_is_of_the_loading_time(monkeypatch):
    items = type("Labelled", (list,), {"labels": [0, 2, 1]})((np.zeros((4, 4), np.uint8), label) for label in (0, 2, 1))
    relabel = np.array([5, 7, 6])
    target = ClassLabel(classes=3, relabel=relabel)
    source = DecodedImages(items, transform=center, size=4, target=target, threads=1)
    assert source.labels.tolist() == source.batch(np.arange(3), np.arange(3))[1].tolist() == [5, 6, 7]
    assert DecodedImages(items, transform=center, size=4, target=3).labels == [0, 2, 1]
    assert DecodedImages([], transform=center, size=4, target=target).labels is None
    monkeypatch.setattr(batch_sources, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    source.loading_seconds = 0.0
    assert source.storage_share == 0
    source.batch(np.array([0, 1, 2, 1]), np.arange(4))
    assert (source.loading_seconds, source.storage_share) == (3, 0)
    for waited, share in ((1.5, 0.5), (6.0, 1.0)):
        items.wait_seconds = waited
        assert source.storage_share == share


@pytest.mark.parametrize(("error", "stops"), [(KeyboardInterrupt, True), (ValueError, False)])
def test_an_interrupt_lets_threads_that_wait_for_a_network_fail(error, stops):
    stopped = []

    def transform(image, out, position):
        raise error

    items = type("Far", (list,), {"stop_reading": lambda self: stopped.append(True)})([(np.zeros((4, 4), np.uint8), 0)])
    with pytest.raises(error):
        DecodedImages(items, transform=transform, size=4, target=1).batch(np.array([0]), np.array([0]))
    assert stopped == [True] * stops


@pytest.mark.parametrize("label", [-1, 3, 1.5, "1", None, [0, 1], 2**70, np.array([True, False]), [1, [2]]])
def test_batch_with_invalid_label_raises_with_image_name(label):
    source = DecodedImages(
        [(np.zeros((9, 9, 3), np.uint8), label)],
        transform=center,
        size=8,
        target=3,
        on_bad_image="skip",
        kind="training image",
    )
    with pytest.raises(DataError, match=r"training image 0: the label .* is not an integer from 0 to 2; fix it"):
        source.batch(np.array([0]), np.array([0]))


class Raises:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise IndexError("beyond")


def test_batch_with_raising_source_names_the_image():
    source = DecodedImages(Raises(), transform=center, size=8, target=3)
    with pytest.raises(DataError, match=r"image 2: the source raised IndexError: .*; it must return \(image, label\)"):
        source.batch(np.array([2]), np.array([0]))


class Lazy:
    """Pixels that NumPy reads by its protocol, of an array whose rows are not contiguous."""

    def __init__(self, pixels):
        self.pixels = pixels

    def __array__(self, dtype=None, copy=None):
        return self.pixels[:, ::-1][:, ::-1]


def test_arrays_in_memory_have_the_types_of_batches_and_their_own_table_of_bad_images():
    bad = {"a.png": "broken"}
    source = ArraySource(np.full((2, 4, 4, 3), 7), np.array([1.0, 0.0]), bad)
    assert (source.images.dtype, source.labels.dtype, len(source)) == (np.uint8, np.int32, 2)
    assert source.bad_images == bad
    assert source.bad_images is not bad


def test_batch_accepts_dicts_pillow_images_and_buffers():
    pixels = smooth_image(12, 12)
    data = encode(pixels, "PNG")
    palette = Image.fromarray(pixels).convert("P")
    items = [{"image": pixels, "label": 1}, (Image.fromarray(pixels), np.int64(1)), (bytearray(data), np.array([1]))]
    items += [(memoryview(data), 1), (palette, 1), (Lazy(pixels), 1), (Lazy(pixels.transpose(1, 0, 2)), 1)]

    def copy(image, out, _):
        assert image.flags.c_contiguous
        out[:] = image

    images, labels = DecodedImages(items, transform=copy, size=12, target=2).batch(np.arange(7), np.arange(7))
    for image in images[:4]:
        np.testing.assert_array_equal(image, pixels)
    np.testing.assert_array_equal(images[4], np.asarray(palette.convert("RGB")))
    np.testing.assert_array_equal(images[5], pixels)
    np.testing.assert_array_equal(images[6], pixels.transpose(1, 0, 2))
    assert labels.tolist() == [1] * 7
