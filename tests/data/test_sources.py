"""Opening the sources of a config, and training on each kind of them."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from helpers.images import GraySquares, folder_config, smooth_image
from helpers.runs import read_records, train_shown

import jaxdp
from jaxdp.choices import SOURCES
from jaxdp.config import Config, Data
from jaxdp.data import datasets, sources
from jaxdp.data.batch_sources import ArraySource, DecodedImages
from jaxdp.data.datasets import with_classes
from jaxdp.data.folder import LocalFolders
from jaxdp.data.from_python import as_source
from jaxdp.errors import ConfigError
from jaxdp.loggers.console import Screen
from jaxdp.setup import prepare
from jaxdp.targets import UNUSABLE

GIVEN = Config(data=Data(source="given", image_size=32))


@pytest.mark.parametrize("classes", [2, 4])
def test_open_datasets_with_another_number_of_classes_than_the_model_raises_with_both_numbers(pictures, classes):
    expected = rf"model.classes={classes}: data.source='folder' has 3 classes; omit it, or use 3"
    config = with_classes(folder_config(pictures), classes)
    for use in (sources.open_datasets, sources.inspect):
        with pytest.raises(ConfigError, match=expected):
            use(config)
    if classes == 2:
        with pytest.raises(ConfigError, match=expected):
            sources.open_datasets(config, may_lack_classes=True)
    else:
        assert sources.open_datasets(config, may_lack_classes=True).class_count == 4


def test_number_of_classes_follows_from_a_folder_and_from_arrays(pictures):
    config = with_classes(folder_config(pictures), None)
    assert sources.open_datasets(config).class_count == 3
    planned, examples = sources.inspect(config)
    assert (planned.model.classes, examples) == (3, 24)
    arrays = [(np.zeros((len(labels), 8, 8), np.uint8), np.array(labels)) for labels in ([0, 1, 2], [4, 0])]
    assert sources.open_datasets(GIVEN, arrays).class_count == 5


def test_one_source_for_both_sets_is_trained_on_as_training_images(tiny):
    source = type("Stated", (list,), {"classes": 6})([(np.zeros((80, 80), np.uint8), 0)] * 2)
    config = dataclasses.replace(tiny, data=Data(source="given", image_size=72))
    opened = sources.open_datasets(config, (source, source))
    assert (opened.train.kind, opened.evaluation.kind) == ("training image", "evaluation image")


def test_labels_that_do_not_count_from_0_are_warned_about():
    images = np.zeros((3, 8, 8), np.uint8)
    one_based = sources.open_datasets(GIVEN, [(images, np.array([1, 2, 3]))] * 2)
    (warning,) = one_based.warnings
    assert warning == "no training image has the label 0, and labels count from 0; if your labels count from 1, subtract 1"
    assert sources.open_datasets(GIVEN, [(images, np.array([0, 1, 2]))] * 2).warnings == ()


def test_pixels_that_are_all_0_or_1_are_warned_about(tmp_path):
    dim = np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8) % 2
    late = np.zeros((3, 8, 8), np.uint8)
    late[2, 7, 7] = 2
    labels = np.array([0, 1, 2])
    np.savez(tmp_path / "all.npz", x_train=late, y_train=labels, x_test=dim, y_test=labels)
    file = Config(data=Data(source="file", directory=str(tmp_path / "all.npz"), image_size=32))
    text = "all pixels of the {} images are 0 or 1 of 255, which is nearly black; multiply them by 255"
    assert sources.open_datasets(file).warnings == (text.format("test"),)
    assert sources.open_datasets(GIVEN, [(dim, labels), (late, labels)]).warnings == (text.format("training"),)
    with pytest.raises(ConfigError, match=r"training images are float64 of shape .*give uint8 pixels from 0 to 255"):
        sources.open_datasets(GIVEN, [(dim / 1, labels)] * 2)


@pytest.mark.parametrize(("dtype", "shape"), [("bool", (-1,)), ("uint8", (-1, 1)), ("int64", (-1,)), ("float64", (-1,))])
def test_labels_that_are_whole_numbers_and_booleans_are_accepted(dtype, shape):
    """Keras has uint8 of shape [N, 1]."""
    images, labels = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 1, 0], dtype).reshape(shape)
    opened = sources.open_datasets(GIVEN, [(images, labels)] * 2)
    assert (opened.class_count, opened.warnings) == (2, ())
    assert repr(opened.train.batch(np.arange(4))[1].tolist()) == "[0, 1, 1, 0]"
    with pytest.raises(ConfigError, match=r"^datasets: row 0 of training has the label 4294967295; .* from 0 to 999,999"):
        sources.open_datasets(GIVEN, [(images, np.full(4, 2**32 - 1, np.uint32))] * 2)
    assert as_source((images, np.full(4, 999_999)), "training").classes == 1_000_000
    with pytest.raises(ConfigError, match=r"^datasets: row 1 of evaluation has the label -1; "):
        sources.open_datasets(GIVEN, [(images, labels), (images, np.array([0, -1, 1, 0]))])


def test_number_of_classes_that_no_source_states_is_required():
    pair = [[(smooth_image(), label) for label in (0, 1)] for _ in range(2)]
    with pytest.raises(ConfigError, match=r"model.classes=None: the data set does not state .*'--model.classes', 'N'"):
        sources.open_datasets(GIVEN, pair)
    with pytest.raises(ConfigError, match=r"model.classes=1: data.source='given' has only one class"):
        sources.open_datasets(GIVEN, [(np.zeros((2, 8, 8), np.uint8), np.zeros(2, int))] * 2)


def test_train_on_a_folder_without_a_number_of_classes_records_it_and_resumes(tiny, pictures, tmp_path):
    data = Data(source="folder", directory=str(pictures), image_size=16, augmentation="pad_and_crop")
    config = small(tiny, data=data, schedule=dataclasses.replace(tiny.schedule, warmup_epochs=0.5))
    config = with_classes(config, None)
    train_shown(config, tmp_path / "run", screen=Screen(quiet=True))
    assert json.loads((tmp_path / "run/config.json").read_text())["model"]["classes"] == 3
    longer = dataclasses.replace(config, epochs=2.0)
    assert train_shown(longer, tmp_path / "run", screen=Screen(quiet=True), accept_changes=True).sessions == 2
    shutil.copytree(pictures / "train/eel", pictures / "train/fox")
    shutil.copytree(pictures / "val/eel", pictures / "val/fox")
    with pytest.raises(ConfigError, match="its class 'fox' is none of the 3 in training"):
        train_shown(dataclasses.replace(config, epochs=3.0), tmp_path / "run", screen=Screen(quiet=True))


@pytest.mark.parametrize("given", [(), ([],), ([], 5), {}, "ab", [1, 2]])
def test_open_datasets_rejects_anything_but_a_pair_of_sources(given):
    with pytest.raises(
        ConfigError, match=r"datasets: must be a pair \(training, evaluation\) of arrays \(images, labels\) or of objects"
    ):
        sources.open_datasets(Config(data=Data(image_size=80)), given)


def test_arrays_of_images_and_labels_of_one_set_are_no_pair():
    arrays = np.zeros((2, 8, 8), np.uint8), np.array([0, 1])
    with pytest.raises(ConfigError, match=r"datasets: are two arrays, not two data sets; give \(\(images, labels\), "):
        sources.open_datasets(GIVEN, arrays)


@pytest.mark.parametrize("channels", [(), (1,), (3,)])
def test_arrays_give_the_images_of_a_list_of_their_items(tiny, channels):
    random = np.random.default_rng(0)
    arrays = [(random.integers(0, 256, (n, 16, 16, *channels), np.uint8), random.integers(0, 6, n)) for n in (50, 20)]
    by_array, by_item = (
        sources.open_datasets(tiny, pair) for pair in (arrays, [list(zip(*pair, strict=True)) for pair in arrays])
    )
    for one, other, (images, labels) in zip(by_array[:2], by_item[:2], arrays, strict=True):
        np.testing.assert_array_equal(one.images, other.images)
        np.testing.assert_array_equal(
            one.images, np.broadcast_to(images.reshape(-1, 16, 16, *channels or (1,)), one.images.shape)
        )
        np.testing.assert_array_equal(one.labels, labels)
        np.testing.assert_array_equal(other.labels, labels)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((4, 8, 8, 3), np.float32), [0] * 4, "training images are float32 of shape (4, 8, 8, 3); give uint8 pixels"),
        (np.zeros((4, 8, 8), np.uint8), [0] * 3, "training labels are int64 of shape (3,); give whole numbers of shape (4,)"),
    ],
)
def test_open_datasets_with_unusable_arrays_raises(images, labels, message):
    with pytest.raises(ConfigError, match=re.escape(f"datasets: {message}")):
        sources.open_datasets(Config(data=Data(image_size=80)), ((images, labels), (images, labels)))


def test_only_small_and_few_images_are_kept_in_memory(pictures, monkeypatch):
    assert isinstance(sources.open_datasets(folder_config(pictures, augmentation="pad_and_crop")).train, ArraySource)
    large = dataclasses.replace(folder_config(pictures, augmentation="pad_and_crop").data, image_size=65)
    config = dataclasses.replace(folder_config(pictures), data=large)
    assert isinstance(sources.open_datasets(config).train, DecodedImages)
    largest = dataclasses.replace(folder_config(pictures, augmentation="pad_and_crop").data, image_size=64)
    monkeypatch.setattr(datasets, "IN_MEMORY_BYTES", 24 * 64 * 64 * 3)
    assert isinstance(sources.open_datasets(dataclasses.replace(config, data=largest)).train, ArraySource)
    monkeypatch.setattr(datasets, "IN_MEMORY_BYTES", 24 * 32 * 32 * 3 - 1)
    assert isinstance(sources.open_datasets(folder_config(pictures, augmentation="pad_and_crop")).train, DecodedImages)


def test_the_evaluation_split_is_the_requested_one_or_the_first_with_a_usual_name(tmp_path):
    splits = LocalFolders(tmp_path)
    with pytest.raises(ConfigError, match=r"none of the splits val, .*, test; hold out .*, or name one .*; it has none$"):
        splits.evaluation_name(None)
    for name in ("train", "test", "valid", "validation", "val"):
        (tmp_path / name).mkdir()
        if name != "train":
            assert splits.evaluation_name(None) == name
    assert splits.evaluation_name("test") == "test"
    names = [str(number) for number in range(21)]
    assert (datasets.listed(names[:20]), datasets.listed(names)) == (", ".join(names[:20]), ", ".join(names[:20]) + ", ...")


def test_an_image_that_cannot_be_read_has_no_prediction(pictures):
    loader = datasets.prediction_loader(folder_config(pictures), [(smooth_image(40, 50), 0), (b"broken", 0)])
    images, labels = loader.batch(np.arange(2), np.arange(2))
    assert (images.shape, labels.tolist(), list(loader.bad_images)) == ((2, 32, 32, 3), [0, UNUSABLE], ["image 1"])


def test_is_resident_requires_images_in_memory(pictures, monkeypatch):
    arrays = ArraySource(np.zeros((2, 4, 4, 3)), np.zeros(2))
    both = datasets.Datasets(arrays, arrays, 0.0, 1.0, class_count=2)
    for limit in (2 * 4 * 4 * 3 - 1, 2 * 4 * 4 * 3):
        monkeypatch.setattr(sources, "IN_MEMORY_BYTES", limit)
        assert sources.is_resident(both, "gpu") == (limit == arrays.images.nbytes)
    arrays = datasets.Datasets(arrays, arrays, 0.0, 1.0, class_count=2)
    assert sources.is_resident(arrays, "gpu")
    assert not sources.is_resident(arrays, "cpu")
    assert not sources.is_resident(sources.open_datasets(folder_config(pictures)), "gpu")


def small(tiny, **changes):
    return dataclasses.replace(tiny, epochs=1.0, batch=(dataclasses.replace(tiny.batch[1], global_batch=8),), **changes)


def test_train_on_folder_with_damaged_images_lists_them(tiny, pictures, tmp_path):
    (pictures / "train/eel/5.JPEG").write_bytes(b"broken")
    (pictures / "val/eel/1.JPEG").write_bytes(b"broken")
    data = Data(
        source="folder", directory=str(pictures), image_size=16, augmentation="random_resized_crop", on_bad_image="skip"
    )
    config = small(tiny, data=data, schedule=dataclasses.replace(tiny.schedule, warmup_epochs=0.5))
    result = jaxdp.train(with_classes(config, None), tmp_path / "run")
    assert sorted(name[-10:] for name in result.bad_images) == ["eel/1.JPEG", "eel/5.JPEG"]
    assert len(json.loads((tmp_path / "run/result.json").read_text())["bad_images"]) == 2
    assert result.eval_examples == 11  # without the damaged one: a replacement would count twice


def test_train_with_resident_images_is_bitwise_identical(tiny, tmp_path, monkeypatch):
    """With several micro-batches, too."""
    config = small(tiny, data=Data(image_size=16, augmentation="pad_and_crop"))
    config = dataclasses.replace(config, epochs=2.0, schedule=dataclasses.replace(tiny.schedule, warmup_epochs=0.5))
    config = dataclasses.replace(config, batch=(dataclasses.replace(config.batch[0], per_worker_batch=2),))
    logs = []
    for platform in ("cpu", "gpu"):  # the second as if the CPU were an accelerator
        monkeypatch.setattr(prepare, "is_resident", lambda opened, _, seen=platform: sources.is_resident(opened, seen))
        jaxdp.train(config, tmp_path / platform, datasets=(GraySquares(26), GraySquares(9)))
        lines = read_records(tmp_path / platform)
        logs.append([[line.get(name) for name in ("step", "loss", "gradient_norm", "eval_loss")] for line in lines])
    assert logs[0] == logs[1]


def striped(data):
    """Four classes of 8x8 images by their brightness."""
    labels = np.arange(40) % 4
    images = (60 * labels).astype(np.uint8)[:, None, None] + np.zeros((40, 8, 8), np.uint8)
    return (images, labels), (images[:20], labels[:20])


def test_a_registered_data_set_trains_as_the_same_arrays_and_is_found_by_evaluate_and_doctor(tiny, tmp_path):
    jaxdp.register_dataset("striped", striped)
    data = Data(source="striped", image_size=16)
    config = with_classes(dataclasses.replace(tiny, data=data, batch=tiny.batch[-1:], epochs=2.0), None)
    by_name = jaxdp.train(config, tmp_path / "name")
    given = jaxdp.train(config, tmp_path / "given", datasets=striped(data))
    assert by_name.loss == given.loss
    assert jaxdp.evaluate(None, tmp_path / "name")["eval_examples"] == 20
    assert [len(items) for _, items in sources.source_of(config).splits(config)] == [40, 20]
    del SOURCES.entries["striped"], SOURCES.implementations["striped"]
    with pytest.raises(ConfigError, match=r"unknown data set; .*or give the recipe that registers the name with --config"):
        jaxdp.evaluate(None, tmp_path / "name")
    jaxdp.register_dataset("broken", lambda data: open("/missing/birds.csv"))
    with pytest.raises(ConfigError, match=r"'broken': its function fails at test_sources\.py:\d+: FileNotFoundError"):
        sources.open_datasets(Config(data=Data(source="broken", image_size=32)))
