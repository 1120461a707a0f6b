"""Fixtures of the tests of checkpoints."""

import jax
import numpy as np
import pytest
from helpers.checkpoints import replicate, save_now

from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.config import Checkpoint
from jaxdp.parallel.mesh import make_mesh


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint of 10 samples, and its abstract state."""
    state, folder = replicate(make_mesh(1, 1), x=np.arange(3.0)), tmp_path / "checkpoints"
    manager = CheckpointManager(folder, Checkpoint(), print)
    save_now(manager, state, 10)
    return folder, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
