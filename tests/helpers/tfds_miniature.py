"""Small data sets prepared by tensorflow-datasets under the names and features of real ones, and TFRecord framing."""

import struct

from jaxdp.config import Config, Data
from jaxdp.data import sources
from jaxdp.data.record_files import masked_checksum


def prepare_miniature(directory, *, name, version, features, splits, configs=()):
    """Prepare a data set as array_record. splits: name -> list of (image, other features by name)."""
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():

        class Miniature(tfds.core.GeneratorBasedBuilder):
            pkg_dir_path = directory
            VERSION = tfds.core.Version(version)
            BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config) for config in configs]  # noqa: RUF012

            def _info(self):
                return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

            def _split_generators(self, manager):
                return {split: self._generate_examples(examples) for split, examples in splits.items()}

            def _generate_examples(self, examples):
                for n, (image, others) in enumerate(examples):
                    yield n, {"image": image} | others

    Miniature.name = name
    Miniature(data_dir=directory, file_format="array_record").download_and_prepare()


def open_split(name, directory, split):
    return sources.open_split(Config(data=Data(source=name, directory=directory, train_split=split)), split)


def frame_record(data: bytes) -> bytes:
    """A TFRecord: length, its checksum, data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + masked_checksum(length) + data + masked_checksum(data)
