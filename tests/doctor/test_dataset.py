"""Check of the recipe's data set."""

from helpers.doctor import run_check

from jaxdp.config import Config, Data, Model
from jaxdp.doctor import dataset


def test_check_data_reports_missing_splits_damaged_images_and_too_many_classes(tmp_path):
    from jaxdp.bench.input import make_images

    def check(directory):
        config = Config(data=Data(source="folder", directory=str(directory)), model=Model(classes=2))
        return run_check(dataset.check_data, config)

    assert check(tmp_path / "missing").status == "error"
    for split in ("train", "val"):
        make_images(tmp_path / split, 4, height=50, width=50)
    result = check(tmp_path)
    assert (result.status, result.message) == ("ok", "train: 4 images; val: 4 images; 2 classes")
    (tmp_path / "val/class0/00000.jpg").write_bytes(b"\xff\xd8 no picture")
    assert "cannot read the first image of val" in check(tmp_path).message
    (tmp_path / "train/class2").mkdir()
    (tmp_path / "train/class2/a.jpg").write_bytes(b"")
    assert check(tmp_path).status == "error"
