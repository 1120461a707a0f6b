"""Held-out images of data that have training images alone."""

import dataclasses
import json
import shutil
import unicodedata

import numpy as np
import pytest
from helpers.images import GraySquares, encode, folder_config, smooth_image
from helpers.remote_data import at_url
from helpers.runs import train_shown
from hypothesis import given
from hypothesis import strategies as st

from jaxdp.config import Config, Data, Model
from jaxdp.data import prefetch, sources
from jaxdp.data.held_out import held_out_mask
from jaxdp.errors import ConfigError
from jaxdp.loggers.console import Screen
from jaxdp.setup.consistency import data_digest

GIVEN = Config(data=Data(source="given", image_size=32, holdout=0.25))


@pytest.fixture
def photos(tmp_path):
    """A folder of the classes a, b and c with 1, 8 and 13 images, some of them in folders below their class."""
    for name, count in (("a", 1), ("b", 8), ("c", 13)):
        for n in range(count):
            path = tmp_path / "photos" / name / ("" if n % 3 else "below/it") / f"é{n}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(smooth_image(40, 50, seed=100 * count + n)))
    return tmp_path / "photos"


def names(part) -> set[str]:
    return {part.source.name(index).partition("photos/")[2] for index in range(len(part))}


@given(
    st.lists(st.tuples(st.text(), st.integers(0, 4)), min_size=1, unique_by=lambda pair: unicodedata.normalize("NFC", pair[0]))
)
def test_every_class_holds_out_its_share_at_least_one_and_never_all_in_any_order(items):
    texts, groups = [text for text, _ in items], np.array([group for _, group in items])
    mask = held_out_mask(texts, groups, 0.25)
    for group in np.unique(groups):
        count = int((groups == group).sum())
        assert mask[groups == group].sum() == (0 if count == 1 else max(1, (2 * count + 4) // 8))
    other = np.random.default_rng(len(items)).permutation(len(items))
    np.testing.assert_array_equal(held_out_mask([texts[row] for row in other], groups[other], 0.25), mask[other])
    composed = [unicodedata.normalize("NFD", text) for text in texts]
    np.testing.assert_array_equal(held_out_mask(composed, groups, 0.25), mask)


def test_images_of_one_name_stay_together():
    mask = held_out_mask([str(n // 7) for n in range(70)], np.zeros(70, int), 0.3)
    assert mask.reshape(10, 7).sum(1).tolist().count(7) == 3
    assert mask.sum() == 21


def test_a_larger_share_holds_out_what_a_smaller_one_does_and_more():
    masks = [held_out_mask(list(map(str, range(200))), np.arange(200) % 4, share) for share in (0.1, 0.2, 0.7)]
    assert [mask.sum() for mask in masks] == [20, 40, 140]
    assert not (masks[0] & ~masks[1]).any()
    assert not (masks[1] & ~masks[2]).any()


@pytest.mark.parametrize("augmentation", ["none", "random_resized_crop"])
@pytest.mark.parametrize("layout", ["classes", "train", "url", "train at url"])
def test_a_folder_is_divided_by_the_names_below_it_wherever_it_lies(photos, tmp_path, layout, augmentation):
    config = folder_config(photos, holdout=0.25, augmentation=augmentation)
    config = dataclasses.replace(config, model=Model())
    first = sources.open_datasets(config)
    assert first.warnings == ("no image is held out of 1 class with a single image, a first",)
    assert [np.bincount(part.labels).tolist() for part in first[:2]] == [[1, 6, 10], [0, 2, 3]]
    held_out, every = names(first.evaluation), {str(file.relative_to(photos)) for file in photos.rglob("*.jpg")}
    assert (held_out | names(first.train), held_out & names(first.train)) == (every, set())
    place = tmp_path / "other/photos"
    shutil.copytree(photos, place / "train" if "train" in layout else place)
    config = at_url(config, f"file://{place}" if "url" in layout else place, tmp_path / "cache")
    again = sources.open_datasets(config)
    assert {name.removeprefix("train/") for name in names(again.evaluation)} == held_out
    for one, other in zip(first[:2], again[:2], strict=True):
        assert data_digest(one) == data_digest(other)
    rows = np.arange(5)
    for part in again[:2]:
        prefetch.read_ahead(part, [rows])
    for part, other in zip(first[:2], again[:2], strict=True):
        np.testing.assert_array_equal(part.batch(rows, rows)[0], other.batch(rows, rows)[0])
    assert sources.inspect(config)[1] == 17
    alone = sources.open_datasets(config, may_lack_classes=True, trained=("a", "b", "c"))
    assert data_digest(alone.evaluation) == data_digest(first.evaluation)


def test_a_table_or_arrays_of_one_split_are_divided(photos, tmp_path):
    rows = [f"{file},{file.relative_to(photos).parts[0]}\n" for file in sorted(photos.rglob("*.jpg"))]
    (tmp_path / "one.csv").write_text("path,label\n" + "".join(rows))
    labels = np.repeat([0, 1], [4, 12])
    np.savez(tmp_path / "one.npz", images=np.zeros((16, 8, 8), np.uint8), labels=labels)
    for file, counts in (("one.csv", ([1, 6, 10], [0, 2, 3])), ("one.npz", ([3, 9], [1, 3]))):
        config = Config(data=Data(source="file", directory=str(tmp_path / file), image_size=32, holdout=0.25))
        opened = sources.open_datasets(config)
        assert [np.bincount(part.labels).tolist() for part in opened[:2]] == [*counts]
        assert sources.inspect(config)[1] == sum(counts[0])
        plain = dataclasses.replace(config, data=dataclasses.replace(config.data, holdout=0.0))
        with pytest.raises(ConfigError, match=r"or hold out a tenth of the images with --data.holdout 0\.1$"):
            sources.open_datasets(plain)


def test_the_training_split_may_have_the_name_of_a_usual_evaluation_split(tmp_path):
    np.savez(tmp_path / "val.npz", val_images=np.zeros((16, 8, 8), np.uint8), val_labels=np.arange(16) % 2)
    data = Data(source="file", directory=str(tmp_path / "val.npz"), image_size=32, holdout=0.25, train_split="val")
    assert [len(part) for part in sources.open_datasets(Config(data=data))[:2]] == [12, 4]


def test_arrays_and_objects_from_python_are_divided_by_position():
    arrays = np.arange(40 * 64, dtype=np.uint32).astype(np.uint8).reshape(40, 8, 8), np.arange(40) % 2
    opened = sources.open_datasets(GIVEN, (arrays, None))
    expected = held_out_mask(list(map(str, range(40))), arrays[1], 0.25)
    np.testing.assert_array_equal(opened.evaluation.labels, arrays[1][expected])
    squares = type("Stated", (GraySquares,), {"classes": 3})(40)  # without `labels`: not by class
    opened = sources.open_datasets(GIVEN, (squares, None))
    assert (len(opened.train), len(opened.evaluation)) == (30, 10)
    squares.labels = ["a", "b", "c"]  # names of the classes
    assert len(sources.open_datasets(GIVEN, (squares, None)).evaluation) == 10
    several = arrays[0], np.eye(4)[np.arange(40) % 4]
    opened = sources.open_datasets(dataclasses.replace(GIVEN, task="labels"), (several, None))
    np.testing.assert_array_equal(
        opened.evaluation.labels, several[1][held_out_mask(list(map(str, range(40))), np.zeros(40), 0.25)]
    )


def test_another_share_or_another_pixel_is_other_data():
    arrays = np.zeros((40, 72, 72), np.uint8), np.arange(40) % 2
    other = arrays[0].copy()
    other[7, 3, 3] = 255
    share = dataclasses.replace(GIVEN, data=dataclasses.replace(GIVEN.data, holdout=0.3, image_size=72))
    config = dataclasses.replace(share, data=dataclasses.replace(share.data, holdout=0.25))
    runs = [(config, arrays[0]), (share, arrays[0]), (config, other)]
    digests = [data_digest(sources.open_datasets(one, ((pixels, arrays[1]), None)).evaluation) for one, pixels in runs]
    assert len({*digests}) == 3


def test_prepared_data_with_a_training_split_alone_are_divided(imagenet, tmp_path):
    config = Config(data=Data(source="imagenet2012", directory=str(imagenet), image_size=32, holdout=0.2))
    for use in (sources.open_datasets, sources.inspect):
        with pytest.raises(ConfigError, match=r"^data.holdout=0.2: the data have the held-out split 'validation'; use .* 0$"):
            use(config)
    shutil.copytree(imagenet, tmp_path / "alone")
    path = tmp_path / "alone/imagenet2012/5.1.0/dataset_info.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"splits": info["splits"][:1]}))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, directory=str(tmp_path / "alone")))
    opened = sources.open_datasets(config)
    assert (len(opened.train), len(opened.evaluation), sources.inspect(config)[1]) == (16, 4, 16)


def test_data_that_have_held_out_images_are_not_divided(pictures, failing):
    with pytest.raises(ConfigError, match=r"^data.holdout=0.25: the data have the held-out split 'val'; use --data.holdout 0$"):
        sources.open_datasets(folder_config(pictures, holdout=0.25))
    arrays = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1])
    with pytest.raises(ConfigError, match=r"^data.holdout=0.25: the data have the held-out images of the pair"):
        sources.open_datasets(GIVEN, (arrays, arrays))
    plain = dataclasses.replace(GIVEN, data=dataclasses.replace(GIVEN.data, holdout=0.0))
    with pytest.raises(ConfigError, match=r"^datasets: have no evaluation images; give .* or hold out .*--data.holdout 0.1$"):
        sources.open_datasets(plain, (arrays, None))
    message = failing(
        "train", "--data.source", "folder", "--data.directory", pictures, "--data.holdout", 0.1, "--data.eval-split", "val"
    )
    assert message == "data.holdout=0.1: not used with data.eval_split='val'; use --data.holdout 0, or omit the split"
    assert failing("train", "--data.holdout", 0.1).startswith(
        "data.holdout=0.1: not used with data.source='digits'; use --data.source"
    )


def test_a_run_resumes_with_the_same_share_alone(tiny, photos, tmp_path):
    data = Data(source="folder", directory=str(photos), image_size=16, holdout=0.25)
    config = dataclasses.replace(tiny, data=data, model=dataclasses.replace(tiny.model, classes=3))
    train_shown(dataclasses.replace(config, epochs=2.0), tmp_path / "run", screen=Screen(quiet=True))
    other = dataclasses.replace(config, data=dataclasses.replace(data, holdout=0.3))
    with pytest.raises(ConfigError, match=r"data.holdout: 0.25 -> 0.3"):
        train_shown(dataclasses.replace(other, epochs=2.0), tmp_path / "run", screen=Screen(quiet=True))
