"""Tests of jaxdp.checkpoint.listing."""

import shutil

from jaxdp.checkpoint.listing import checkpoint_paths
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.config import Checkpoint


def test_checkpoint_paths_ignores_names_that_are_not_plain_numbers(saved):
    folder, abstract = saved
    for name in ("²", "٣", "007", "1_0", "+1", "saving-²"):
        shutil.copytree(folder / "10", folder / name)
    assert [path.name for path in checkpoint_paths(folder)] == ["10"]
    assert CheckpointManager(folder, Checkpoint(), print).restore(lambda samples: abstract)[1].samples == 10
