"""Check of the recipe's data set."""

from functools import partial

import numpy as np
from helpers.doctor import run_check

import jaxdp
from jaxdp.config import Config, Data, Model
from jaxdp.doctor import dataset


def test_check_images_decodes_every_image_and_lists_those_that_cannot_be_used(tmp_path, monkeypatch):
    from jaxdp.bench.input import make_images

    for split in ("train", "val"):
        make_images(tmp_path / split, 4, height=50, width=50)
    (tmp_path / "train/class0/00002.jpg").write_bytes(b"\xff\xd8 no picture")
    (tmp_path / "train/class1/00003.jpg").write_bytes(b"")
    lines = []

    def check(on_bad_image):
        config = Config(data=Data(source="folder", directory=str(tmp_path), on_bad_image=on_bad_image))
        return run_check(partial(dataset.check_images, info=lines.append), config)

    result = check("stop")
    assert (result.status, result.message.count("00002.jpg")) == ("error", 1)
    assert result.message.startswith("2 of 4 images of train cannot be used: ")
    assert result.message.endswith("; 4 images of val decoded")
    assert "--data.on-bad-image skip" in result.fix
    assert lines == ["decoding 4 images of train ...", "decoding 4 images of val ..."]
    monkeypatch.setattr(dataset, "LISTED", 1)
    result = check("skip")
    assert (result.status, "and 1 more" in result.message) == ("warning", True)


class Items:
    """Ten items; a label that is none in the second."""

    classes = 2

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"image": self.first if index == 0 else np.zeros((8, 8), np.uint8), "label": 5 if index == 1 else 0}


def test_items_that_are_dicts_are_read_as_in_training():
    jaxdp.register_dataset("items", lambda data: (Items(b""), Items(b"")))
    config = Config(data=Data(source="items"), model=Model(classes=2))
    result = run_check(partial(dataset.check_images, info=print), config)
    assert "image of train 1: the label 5 is not an integer" in result.message
    assert "1 of 10 images of train cannot be used: image of train 0 " in result.message
