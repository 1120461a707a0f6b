"""Writes the directory of a finished run without training, for tests of what reads such a directory."""

import dataclasses
from functools import partial

import jax

from jaxdp import models
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.progress import Progress
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.state import create_state, replicated
from jaxdp.validation import to_json

SAMPLES, STEPS = 160, 15


def save_run(config, run_dir, params, batch_stats) -> None:
    """Write config.json and one checkpoint of these weights, taken after STEPS steps and SAMPLES samples."""
    mesh = make_mesh(1, 1)
    place = partial(jax.device_put, device=replicated(mesh))
    state = create_state(config, models.create(config.model), mesh)
    state = state._replace(params=place(params), batch_stats=place(batch_stats))
    run_dir.mkdir()
    (run_dir / "config.json").write_text(to_json(config))
    checkpoints = CheckpointManager(run_dir / "checkpoints", config.checkpoint, print)
    metadata = {
        "config": dataclasses.asdict(config),
        "epoch": 3.2,
        "evaluation": {config.first_metric: 0.5, "eval_loss": 1.0, "eval_examples": 10},
        "progress": dataclasses.asdict(Progress(samples=SAMPLES, steps=STEPS)),
    }
    checkpoints.save(state, SAMPLES, metadata)
    checkpoints.wait()
    checkpoints.check()
    checkpoints.close()
