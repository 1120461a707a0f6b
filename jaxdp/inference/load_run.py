"""Loading the state of a run from one of its checkpoints, or a file of weights to evaluate or to predict with."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxdp import models
from jaxdp.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    CorruptCheckpoint,
    Manifest,
    read_manifest,
)
from jaxdp.checkpoint.orbax_io import CheckpointMismatch, load_state
from jaxdp.choices import TASKS
from jaxdp.config import Config, Data, Optimizer, Preprocessing
from jaxdp.config_words import evaluation_words
from jaxdp.distributed import runtime
from jaxdp.errors import ConfigError
from jaxdp.files import expand_user, is_url, read_regular
from jaxdp.inference.checkpoints import open_checkpoint
from jaxdp.models import preprocessing, weights
from jaxdp.models.finetune import module_variables
from jaxdp.parallel.mesh import make_mesh
from jaxdp.setup.run_dir import run_config
from jaxdp.training.state import TrainState, abstract_state, from_host
from jaxdp.validation import changes, validate, with_fields
from jaxdp.xla.jax_options import jaxdp_jax_config

WEIGHTS = "--weights"


class LoadedRun(NamedTuple):
    """A run's state, restored from the checkpoint of `manifest` onto this machine's devices.

    opt_state and loss_scale of the state are None, unless the whole state was asked for.
    """

    state: TrainState
    config: Config
    manifest: Manifest


@jaxdp_jax_config()
def load_run(
    workdir: str | Path, checkpoint: str = "result", config: Config | None = None, *, whole: bool = False
) -> LoadedRun:
    """Restore a checkpoint of the run in `workdir`, a directory or URL, on all devices of this machine.

    checkpoint: see `choose_checkpoint`. config: the run's config with changes; None for the run's own. whole: also the
    optimizer's state; its optimizer must be registered. Raises ConfigError if the checkpoint is missing, corrupt, or
    of another model, and if the model is not registered.
    """
    config = config or run_config(workdir)
    with open_checkpoint(workdir, checkpoint) as manifest:
        return load_checkpoint(manifest, config, whole=whole)


@jaxdp_jax_config()
def load_params(run: str | Path, checkpoint: str = "result", *, averaged: bool = True) -> dict[str, Any]:
    """The trained parameters of a run, as {"params": ..., "batch_stats": ...}: nested dicts of float32 NumPy arrays.

    A registered linen module gets the variables of its `apply`; an nnx module gets pure dicts, for
    `nnx.replace_by_pure_dict`. `jaxdp.train(initial_params=...)` starts from them.

    run: the directory or URL of a run, or the directory of a checkpoint. checkpoint: which of a run: result (the newest, or
    with early stopping the best), newest, best, or its number of samples. averaged: the weights of evaluations, which are
    averaged with `optimizer.average_decay`; False: those that were trained last.

    Raises ConfigError if the run or the checkpoint is missing or corrupt, or its model is not registered.
    """
    loaded = _load_any(run, str(checkpoint))
    state = loaded.state
    trees = state.eval_variables if averaged else (state.params, state.batch_stats)
    return module_variables(*jax.device_get(trees))


def _load_any(run: str | Path, checkpoint: str) -> LoadedRun:
    """The state of a run, or of a checkpoint at a path."""
    if is_url(run) or not ((path := Path(expand_user(run, "run"))) / MANIFEST).exists():
        return load_run(run, checkpoint)
    if checkpoint != "result":
        reason = f"{path} is itself a checkpoint"
        raise ConfigError("checkpoint", checkpoint, reason=reason, hint="omit it, or give the directory of the run")
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        raise ConfigError("run", str(path), reason=str(error), hint="use another checkpoint") from None
    return load_checkpoint(manifest, manifest.config)


def load_checkpoint(manifest: Manifest, config: Config, *, whole: bool = False) -> LoadedRun:
    """Restore a checkpoint on all devices of this machine. Raises as `load_run`."""
    mesh = _mesh(config)
    name = manifest.path.name
    try:
        state = load_state(manifest, _abstract(manifest.config_of_state(config), mesh, whole=whole))
    except CorruptCheckpoint as error:
        raise ConfigError("--checkpoint", name, reason=str(error), hint="use another checkpoint") from None
    except CheckpointMismatch as error:
        differences = [change for change in changes(manifest.config, config) if change.startswith("model.")]
        if not differences:
            raise ConfigError("--checkpoint", name, reason=str(error)) from None
        reason = f"the checkpoint is of another model ({'; '.join(differences)})"
        raise ConfigError("--checkpoint", name, reason=reason, hint="remove these model options") from None
    return LoadedRun(state, config, manifest)


def _abstract(config: Config, mesh: jax.sharding.Mesh, *, whole: bool) -> TrainState:
    """Shapes, dtypes and shardings of what is restored; without the optimizer's state, no optimizer is needed."""
    model = models.create(config.model)
    if whole:
        return abstract_state(config, model, mesh)
    any_optimizer = with_fields(config, {"optimizer.name": "sgd"})
    return abstract_state(any_optimizer, model, mesh)._replace(opt_state=None, loss_scale=None)


def _mesh(config: Config) -> jax.sharding.Mesh:
    """All devices of this machine."""
    devices = runtime.start(config.mesh, cache=True)
    return make_mesh(config.mesh.vertical, config.mesh.horizontal, devices)


def inference_batch(examples: int, mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """(images per step, rows of the padded batch) for `examples` images; the devices divide the rows evenly."""
    images = min(examples, 64 * mesh.size)
    return images, -(-images // mesh.size) * mesh.size


class LoadedWeights(NamedTuple):
    """A file of weights on the devices. eval_variables: (params, batch_stats). words: network, digest, preprocessing."""

    eval_variables: tuple[dict, dict]
    mesh: jax.sharding.Mesh
    config: Config
    words: str


def weights_config(path: str | Path, given: Preprocessing | None = None, *, blur_pool: str = "none") -> Config:
    """A config that evaluates a file of weights on given images, prepared as the file states, or else as usual.

    given: preprocessing that replaces what the file states. blur_pool: `model.blur_pool` of a file that states none. Raises
    ConfigError for a file that cannot be used.
    """
    path = expand_user(path, WEIGHTS)
    model = weights.read(path, WEIGHTS, blur_pool=blur_pool).model
    stated = preprocessing.merge(preprocessing.USUAL, preprocessing.of_file(path, WEIGHTS))
    data = preprocessing.with_preprocessing(Data(source="given"), preprocessing.merge(stated, given or Preprocessing()))
    task = preprocessing.metadata_of(read_regular(path, preprocessing.MAX_FILE_BYTES)).get("task", Config.task)
    optimizer = Optimizer(loss=(*TASKS[task].losses, Optimizer.loss)[0])
    return validate(Config(name="weights", task=task, data=data, model=model, optimizer=optimizer))


@jaxdp_jax_config()
def load_weights(path: str | Path, config: Config) -> LoadedWeights:
    """Read a file of weights onto all devices of this machine. config: from `weights_config`, with changes.

    Raises ConfigError for a file that cannot be used, and for one of another network than the config's.
    """
    config, read = validate(config), weights.read(path, WEIGHTS, blur_pool=config.model.blur_pool)
    if weights.network_json(read.model) != weights.network_json(config.model):
        reason = f"it is a {read.describe()}, and not the network of the options"
        raise ConfigError(WEIGHTS, str(path), reason=reason, hint="omit the model options")
    mesh = _mesh(config)
    params, batch_stats = (jax.tree.map(partial(from_host, mesh=mesh), tree) for tree in (read.params, read.batch_stats))
    words = f"{path}: {read.describe()}, digest {read.digest}, {evaluation_words(config)}"
    return LoadedWeights((params, batch_stats), mesh, config, words)
