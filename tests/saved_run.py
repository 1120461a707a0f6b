"""What a run leaves, without the run: for tests of what can be done with it."""

import dataclasses
from functools import partial

import jax

from jaxdp import models
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training import checkpoint
from jaxdp.training.state import create_state, replicated
from jaxdp.validation import to_json

STEPS = 15


def save(config, workdir, params, batch_stats) -> None:
    """The directory of a run that ended with these weights after STEPS steps."""
    mesh = make_mesh(1, 1)
    place = partial(jax.device_put, device=replicated(mesh))
    state = create_state(config, models.create(config.model), mesh)
    state = state._replace(params=place(params), batch_stats=place(batch_stats))
    workdir.mkdir()
    (workdir / "config.json").write_text(to_json(config))
    kept = checkpoint.Checkpoints(workdir / "checkpoints", config.checkpoint, print)
    told = {"config": dataclasses.asdict(config), "epoch": 3.2, "accuracy": 0.5, "progress": {"steps": STEPS}}
    kept.save(state, 160, told)
    kept.wait()
    kept.check()
    kept.close()
