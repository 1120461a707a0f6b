"""The stages that `jaxdp bench input` measures."""

import pytest
from helpers.images import encode, folder_config, smooth_image

from jaxdp.bench import input as bench
from jaxdp.parallel.mesh import make_mesh


class Counted(list):
    read = 0

    def __getitem__(self, index):
        self.read += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("name", "batches"), [("batch, one thread", 1), ("batch, 2 threads", bench.BATCHES)])
def test_batches_of_fewer_images_read_as_many_as_they_count(tmp_path, name, batches):
    """The copies of an image in one batch would be decoded only once."""
    source = Counted([(encode(smooth_image()), 0)] * 5)
    stages = bench._pipeline_stages(folder_config(tmp_path, threads=2), make_mesh(1, 1), source, batch_size=12)
    (stage,) = [stage for stage in stages if stage.name == name]
    source.read = 0
    stage.work()
    assert source.read == stage.images == 12 * batches
