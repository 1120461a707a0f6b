"""Folders of images: classes, order, and errors for folders that cannot be trained on."""

import errno
import os

import numpy as np
import pytest
from helpers.images import folder_config
from helpers.remote_data import at_url

from jaxdp.cloud.remote_folder import RemoteFolder
from jaxdp.cloud.source import RemoteData
from jaxdp.config import Storage
from jaxdp.data import image_folder, progress, sources
from jaxdp.data.batch_sources import DecodedImages
from jaxdp.data.datasets import similar_splits
from jaxdp.data.image_folder import find_images
from jaxdp.errors import ConfigError
from jaxdp.setup.consistency import data_digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda root: (root / "train").rename(root / "Train"),
            "it has no folder 'train'; use --data.train-split Train, or arrange images as train/",
        ),
        (lambda root: [f.unlink() for f in (root / "train/dog").iterdir()], "class folder .*train/dog' has no images"),
        (
            lambda root: [[f.unlink() for f in (root / "val/cat").iterdir()], (root / "val/cat").rmdir()],
            "'val' has no folder for 1 of 3 training classes, such as 'cat'; add",
        ),
        (
            lambda root: (root / "train").rename(root.with_name("train")),
            "it has no folder 'train'; use --data.directory /",
        ),
        (lambda root: (root / "val/cow").symlink_to(root / "nowhere"), "dangling link .*val/cow'; fix or remove it"),
    ],
)
def test_open_unusable_folder_raises_one_line(pictures, change, message):
    change(pictures)
    with pytest.raises(ConfigError, match=message) as error:
        sources.open_datasets(folder_config(pictures))
    assert "\n" not in str(error.value)


def fill(split, names):
    """Empty files at these paths below a split."""
    for name in names:
        (split / name).parent.mkdir(parents=True, exist_ok=True)
        (split / name).touch()


NESTED = ("b/1.png", "b/10.png", "b/2.png", "b/B.png", "b/c/z.png", "b/c-d/a.png", "b/c/A/1.png", "b/0/q.png", "b/c.png")
IN_ORDER = ["b/0/q.png", "b/1.png", "b/10.png", "b/2.png", "b/B.png", "b/c/A/1.png", "b/c/z.png", "b/c-d/a.png", "b/c.png"]


@pytest.mark.parametrize("place", ["disk", "url"])
def test_images_in_folders_of_a_class_are_found_in_the_order_of_names(tmp_path, monkeypatch, place):
    """Whatever the order of the file system; each folder is sorted by code points, as flat ones are."""
    split, scandir = tmp_path / "pics/train", os.scandir
    fill(split, [*NESTED, "a/only/deep/er/1.JPG", "a/only/notes.txt", "a/.hidden/1.png", "a/only/.2.png"])
    if place == "disk":
        monkeypatch.setattr(image_folder.os, "scandir", lambda path: list(scandir(path))[::-1])
        source = image_folder.ImageFolder.open(split)
    else:
        root = f"file://{tmp_path}/pics"
        source = RemoteFolder.open(RemoteData(root, Storage(directory=str(tmp_path / "cache"))), "train")
    names = [source.name(index).partition("/train/")[2] for index in range(len(source))]
    assert names == ["a/only/deep/er/1.JPG", *IN_ORDER]
    assert (source.labels, source.classes) == ([0] + [1] * 9, ["a", "b"])
    assert [text.rpartition("/train")[2] for text in source.warnings] == ["/a/only/notes.txt first"]


@pytest.mark.parametrize("place", ["disk", "url"])
@pytest.mark.parametrize(
    ("names", "order"), [("0 1 10 2 3 4 5 6 7 8 9", [*map(str, range(11))]), ("1 10 2", ["1", "10", "2"])], ids=["all", "some"]
)
def test_folders_0_to_n_are_in_the_order_of_their_numbers(tmp_path, place, names, order):
    """As in ImageNet-V2."""
    fill(tmp_path / "train", [f"{name}/{name}.png" for name in names.split()])
    root = f"file://{tmp_path}"
    source = (
        image_folder.ImageFolder.open(tmp_path / "train")
        if place == "disk"
        else RemoteFolder.open(RemoteData(root, Storage(directory=str(tmp_path / "cache"))), "train")
    )
    assert source.classes == order
    assert [source.name(index).rpartition("/")[2] for index in range(len(source))] == [f"{name}.png" for name in order]
    assert [*source.labels] == list(range(len(order)))


def test_a_class_that_only_the_evaluation_split_has_and_a_split_without_classes_are_refused(tmp_path):
    fill(tmp_path / "val", ["a/1.png", "c/1.png", "stray.png"])
    with pytest.raises(ConfigError, match=r"'val' has the class 'c', which the training split lacks; add it to the training"):
        image_folder.ImageFolder.open(tmp_path / "val", ["a", "b"])
    assert image_folder.ImageFolder.open(tmp_path / "val", ["c", "a"]).labels == [0, 1]
    fill(tmp_path / "test", ["1.png"])
    with pytest.raises(ConfigError, match=r"'test' has no class folders; arrange images as SPLIT/CLASS/IMAGE"):
        image_folder.ImageFolder.open(tmp_path / "test")


@pytest.mark.parametrize(("files", "sized"), [(5, [0, 2, 4]), (3, [0, 1, 2]), (6, [0, 2, 4]), (7, [0, 3, 6])])
def test_a_split_is_told_from_others_by_its_names_and_the_sizes_of_some(tmp_path, monkeypatch, files, sized):
    monkeypatch.setattr(image_folder, "SIZED", 3)
    names = [f"{'ab'[number % 2]}/{number}.png" for number in range(files)]
    fill(tmp_path / "train", names)
    for name in names:
        (tmp_path / "train" / name).write_bytes(bytes(10 + int(name[2])))
    source = image_folder.ImageFolder.open(tmp_path / "train")
    numbers = [int(name[2]) for name in sorted(names)]
    assert source.identity() == [f"/{name}" for name in sorted(names)] + [str(10 + numbers[index]) for index in sized]
    (tmp_path / "train/a/0.png").unlink()
    assert source.identity()[files] == "-1"


def test_images_beside_the_classes_are_named(pictures, tmp_path):
    fill(pictures / "train", ["stray.jpg", "another.png", ".hidden.png", "labels.csv"])
    config = folder_config(pictures)
    for datasets, root in (
        (sources.open_datasets(config), str(pictures)),
        (sources.open_datasets(at_url(config, f"file://{pictures}", tmp_path / "cache")), f"file://{pictures}"),
    ):
        assert len(datasets.train) == 24
        train = f"{root}/train"
        assert datasets.warnings == (f"ignored 2 images without a class, directly in {train}, {train}/another.png first",)


def test_links_from_a_class_are_followed_but_not_to_what_contains_it(tmp_path):
    split, other = tmp_path / "train", tmp_path / "other"
    fill(split, ["a/1.png", "a/below/2.png", "b/3.png"])
    fill(other, ["4.png", "deep/5.png"])
    (split / "a/linked").symlink_to(other)
    (other / "back").symlink_to(split / "a/below")
    (other / "top").symlink_to(tmp_path)
    (other / "deep/up").symlink_to(other)
    (split / "a/below/class").symlink_to(split / "a")
    (split / "a/below/split").symlink_to(split)
    source = image_folder.ImageFolder.open(split)
    names = [source.name(index).partition("/train/")[2] for index in range(len(source))]
    assert names == ["a/1.png", "a/below/2.png", "a/linked/4.png", "a/linked/deep/5.png", "b/3.png"]
    assert source.warnings == []
    (tmp_path / "alias").symlink_to(split)
    assert len(image_folder.ImageFolder.open(tmp_path / "alias")) == 5
    for target in (split, tmp_path):
        (split / "c").symlink_to(target)
        with pytest.raises(ConfigError, match=r"class folder '.*/train/c' has no images"):
            image_folder.ImageFolder.open(split)
        (split / "c").unlink()


@pytest.fixture
def closed_is_unreadable(monkeypatch):
    """Folders named closed cannot be listed, even by root."""
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(image_folder.os, "scandir", refusing)


def test_a_folder_of_a_class_that_cannot_be_read_raises(tmp_path, closed_is_unreadable):
    fill(tmp_path / "train", ["a/1.png", "a/closed/2.png"])
    with pytest.raises(ConfigError, match=r"^data.directory='.*/a/closed': Permission denied$"):
        image_folder.ImageFolder.open(tmp_path / "train")


COMPOSED, DECOMPOSED = "caf\xe9", "cafe\u0301"  # both shown as café


@pytest.mark.parametrize(
    ("names", "place"), [((COMPOSED, DECOMPOSED), "disk"), ((DECOMPOSED, COMPOSED), "url")], ids=["disk", "url"]
)
def test_class_names_in_another_unicode_form_are_equal(pictures, tmp_path, names, place):
    for split, name in zip(("train", "val"), names, strict=True):
        (pictures / split / "cat").rename(pictures / split / name)
    config = folder_config(pictures)
    datasets = sources.open_datasets(at_url(config, f"file://{pictures}", tmp_path / "cache") if place == "url" else config)
    assert datasets.classes == (names[0], "dog", "eel")
    assert datasets.evaluation.source.labels == [0] * 3 + [1] * 4 + [2] * 5
    (pictures / "val" / names[0]).mkdir()
    fill(pictures / "val", [f"{names[0]}/1.png"])
    with pytest.raises(ConfigError, match=r"'val' has two class folders '.*' that differ only in their Unicode form"):
        sources.open_datasets(at_url(config, f"file://{pictures}", tmp_path / "cache") if place == "url" else config)


def test_folders_that_look_like_splits_are_suggested():
    hint = "use --data.train-split Train --data.eval-split 'TEST set'"
    assert similar_splits(["Train", "TEST set", "photos"]) == hint
    assert similar_splits(["train", "val", "Testing"]) == ""


def test_names_with_control_characters_are_escaped(tmp_path):
    place = tmp_path / "train/a"
    place.mkdir(parents=True)
    for name in (b"bad\n\x1b[31m.png", b"bad\xff.png", b"note\x1b]0;x\x07.txt"):
        with open(os.path.join(os.fsencode(place), name), "wb") as file:
            file.write(b"no image")
    source = image_folder.ImageFolder.open(tmp_path / "train")
    names = [source.name(index) for index in range(2)]
    assert names == [f"{place}/bad\\n\\x1b[31m.png", f"{place}/bad\\udcff.png"]
    assert source.warnings[0].endswith(f"{place}/note\\x1b]0;x\\x07.txt first")
    loader = DecodedImages(source, transform=None, size=8, target=2, on_bad_image="ignore")
    loader.batch(np.arange(2), np.arange(2))
    assert sorted(loader.bad_images) == sorted(names)
    assert data_digest(loader).startswith("2 images, ")


def test_open_class_name_not_utf8_raises(tmp_path):
    (tmp_path / "train").mkdir()
    os.mkdir(os.fsencode(tmp_path) + b"/train/\xe4")
    with pytest.raises(ConfigError, match=r"class folder name '.udce4' is not UTF-8; rename it$"):
        image_folder.ImageFolder.open(tmp_path / "train")


def test_image_files_follows_links_and_reports_unreadable_files(tmp_path, monkeypatch):
    """Links are followed, also where they lead back; what is hidden is left out, and what cannot be read is named."""
    inside, other = tmp_path / "inside", tmp_path / "other"
    for path in (inside / "a.png", inside / ".hidden.png", inside / ".trash" / "b.png", other / "deep" / "c.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (inside / "linked").symlink_to(other)
    (inside / "loop").symlink_to(inside)
    (inside / "gone.png").symlink_to(tmp_path / "nowhere")
    (inside / "itself").symlink_to(inside / "itself")
    (inside / "notes.txt").touch()
    (tmp_path / "alias").symlink_to(inside)
    os.mkfifo(inside / "pipe.png")
    listed = []
    monkeypatch.setattr(progress, "listener", lambda: listed.append(1))
    found, left_out, bad = find_images([inside])
    assert len(listed) == 3
    assert found == [str(inside / "a.png"), str(inside / "linked" / "deep" / "c.png")]
    assert left_out == [str(inside / "notes.txt")]
    assert [len(part) for part in find_images([tmp_path / "alias"])] == [2, 1, 3]
    monkeypatch.setenv("HOME", str(inside))
    assert find_images(["~/notes.txt", inside / "a.png"]) == ([str(inside / "notes.txt"), str(inside / "a.png")], [], {})
    for missing, message in (("gone", "no such file or folder"), ("s3://a/b.png", "images=")):
        with pytest.raises(ConfigError, match=message):
            find_images([missing])
    assert bad == {
        str(inside / "gone.png"): "dangling link",
        str(inside / "itself"): "dangling link",
        str(inside / "pipe.png"): "not a regular file",
    }
    with pytest.raises(ConfigError, match=r"pipe.png': not a regular file"):
        find_images([inside / "pipe.png"])


def test_image_files_reports_an_unreadable_folder(tmp_path, closed_is_unreadable):
    (tmp_path / "closed").mkdir()
    (tmp_path / "open.png").touch()
    assert find_images([tmp_path]) == ([str(tmp_path / "open.png")], [], {str(tmp_path / "closed"): "Permission denied"})
    with pytest.raises(ConfigError, match=r"has no images .*; cannot read .*closed: Permission denied"):
        find_images([tmp_path / "closed"])
