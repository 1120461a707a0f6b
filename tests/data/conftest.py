"""A folder of images and a miniature ImageNet in both record formats."""

import io
import itertools
import json

import pytest
from helpers.images import encode, smooth_image
from helpers.tfds_miniature import frame_record, prepare_miniature


@pytest.fixture
def pictures(tmp_path):
    """A folder of three classes with 7, 8, 9 training and 3, 4, 5 evaluation images of several sizes and formats."""
    for split, first in (("train", 7), ("val", 3)):
        for label, name in enumerate(("cat", "dog", "eel")):
            (tmp_path / "pics" / split / name).mkdir(parents=True)
            for n in range(first + label):
                pixels = smooth_image(50 + 3 * n, 60 - 2 * n, seed=100 * label + n)
                data = encode(pixels, "PNG" if n == 2 else "JPEG", mode="L" if n == 1 else "RGB")
                (tmp_path / "pics" / split / name / f"{n}.JPEG").write_bytes(data)
    return tmp_path / "pics"


@pytest.fixture(scope="session")
def imagenet(tmp_path_factory):
    """A directory of tensorflow-datasets with 20 training and 7 validation images as ImageNet, in array_record. Read-only."""
    import tensorflow_datasets as tfds

    directory = tmp_path_factory.mktemp("tfds")
    features = {"image": tfds.features.Image(encoding_format="jpeg"), "label": tfds.features.ClassLabel(num_classes=1000)}
    features["file_name"] = tfds.features.Text()

    def examples(count, seed):
        return [
            (io.BytesIO(encode(smooth_image(40, 50, seed=seed + n))), {"label": (37 * n) % 1000, "file_name": f"{n}.JPEG"})
            for n in range(count)
        ]

    splits = {"train": examples(20, 0), "validation": examples(7, 50)}
    prepare_miniature(directory, name="imagenet2012", version="5.1.0", features=features, splits=splits)
    return directory


@pytest.fixture
def imagenet_tfrecord(imagenet, tmp_path):
    """The same records as TFRecord, the training split in two files of 13 and 7."""
    from array_record.python.array_record_module import ArrayRecordReader

    old, new = imagenet / "imagenet2012/5.1.0", tmp_path / "tfds/imagenet2012/5.1.0"
    new.mkdir(parents=True)
    info = json.loads((old / "dataset_info.json").read_text())
    info["fileFormat"] = "tfrecord"
    info["splits"][0]["shardLengths"] = ["13", "7"]
    (new / "dataset_info.json").write_text(json.dumps(info))
    (new / "features.json").write_text((old / "features.json").read_text())
    for split, bounds in (("train", [0, 13, 20]), ("validation", [0, 7])):
        reader = ArrayRecordReader(str(old / f"imagenet2012-{split}.array_record-00000-of-00001"))
        records = reader.read_all()
        for shard, (first, last) in enumerate(itertools.pairwise(bounds)):
            data = b"".join(frame_record(record) for record in records[first:last])
            (new / f"imagenet2012-{split}.tfrecord-{shard:05}-of-{len(bounds) - 1:05}").write_bytes(data)
    return tmp_path / "tfds"
