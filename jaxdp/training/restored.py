"""What can be done with the checkpoints that a run has kept, beside going on from them: list, evaluate, export."""

import dataclasses
import errno
import json
from pathlib import Path

import jax
import numpy as np

from jaxdp import models
from jaxdp.config import Config, ConfigError
from jaxdp.data.sources import open_datasets
from jaxdp.errors import first_line
from jaxdp.parallel import distributed
from jaxdp.parallel.mesh import choose_shape, make_mesh
from jaxdp.training import checkpoint, seal
from jaxdp.training.evaluation import Confusion, make_evaluation_step
from jaxdp.training.evaluation import evaluate as evaluate_on
from jaxdp.training.state import TrainState, abstract_state
from jaxdp.training.workdir import CHECKPOINTS, run_config
from jaxdp.validation import validate


def listed(workdir) -> list[dict]:
    """All checkpoints of a run, the oldest first: path, samples, epoch, steps, accuracy, bytes, and damage (None if sound).

    Every byte of every checkpoint is read.
    """
    run_config(workdir)
    rows = []
    for path in reversed(seal.directories(Path(workdir) / CHECKPOINTS)):
        row = dict.fromkeys(("epoch", "steps", "accuracy", "bytes", "damage"))
        row = {"path": str(path), "samples": int(path.name)} | row
        try:
            sealed = seal.read(path)
            row |= {"epoch": sealed.told["epoch"], "steps": sealed.told["progress"]["steps"]}
            row |= {"accuracy": sealed.accuracy, "bytes": sealed.num_bytes}
            seal.check_files(sealed)
        except (seal.Damaged, seal.Unreadable) as error:
            row["damage"] = str(error)
            if not path.exists():  # removed by the run, while this one looked
                continue
        rows.append(row)
    return rows


def chosen(workdir, which: str = "newest") -> seal.Sealed:
    """The checkpoint that `which` names: newest, best (by accuracy), or its samples. Raises ConfigError where there is none."""
    folder = Path(workdir) / CHECKPOINTS
    found = list(seal.all_sealed(folder))
    if which not in ("newest", "best"):
        return _named(folder, which)
    if which == "best":
        scored = seal.by_accuracy(found)
        if found and not scored:
            raise ConfigError("--checkpoint: 'best' is not allowed; none was saved right after an evaluation; give newest")
        found = scored
    for one in found:
        if seal.is_sound(one):
            return one
    raise ConfigError(f"--workdir: {str(workdir)!r} is not allowed; it holds no sound checkpoint (see jaxdp checkpoints)")


def _named(folder: Path, which: str) -> seal.Sealed:
    for path in seal.directories(folder):
        if which == path.name:
            try:
                return seal.read(path)
            except seal.Damaged as error:
                raise ConfigError(f"--checkpoint: {which!r} is not allowed; {error}") from None
    there = ", ".join(path.name for path in seal.directories(folder)) or "none"
    raise ConfigError(f"--checkpoint: {which!r} is not allowed; give newest, best, or the samples of one: {there}")


def restored(workdir, which: str = "newest", config: Config | None = None) -> tuple[TrainState, Config, seal.Sealed]:
    """(state, config, checkpoint) of a run, on all devices of this machine. config: the run's own, changed where it may be.

    Raises ConfigError for a checkpoint that is not there, damaged, or of another model.
    """
    config = run_config(workdir) if config is None else validate(config)
    sealed = chosen(workdir, which)
    devices = distributed.start(config.mesh, compile=config.compile)
    mesh = make_mesh(*choose_shape(config.mesh, len(devices), jax.process_count()))
    try:
        state = checkpoint.load(sealed, abstract_state(config, models.create(config.model), mesh))
    except (seal.Damaged, checkpoint.Unfit) as error:
        raise ConfigError(f"--checkpoint: {sealed.path.name!r} is not allowed; {error}") from None
    return state, config, sealed


def evaluate(config: Config | None, workdir, which: str = "newest", datasets=None) -> dict:
    """Accuracy, top-5, loss and number of the held-out images for a checkpoint, with its samples, epoch and path.

    config: None for the run's own; another may name other data, or another evaluation split. datasets: as for `jaxdp.train`.
    Raises ConfigError where the run, the checkpoint or the data are not there.
    """
    return _evaluated(config, workdir, which, datasets)[0]


def confusion(config: Config | None, workdir, which: str = "newest", datasets=None) -> tuple[dict, np.ndarray, list[str]]:
    """(what `evaluate` returns, counts int64 [classes, classes] of the held-out images by label (rows) and predicted class, the
    names of the classes). Every image is counted once. The arguments and errors are those of `evaluate`."""
    config = run_config(workdir) if config is None else config
    counts = Confusion(config.model.classes)
    told, data = _evaluated(config, workdir, which, datasets, counts)
    names = data.class_names
    return told, counts.counts, [*names, *map(str, range(len(names), config.model.classes))]


def _evaluated(config: Config | None, workdir, which: str, datasets, look=None):
    state, config, sealed = restored(workdir, which, config)
    data = open_datasets(config, datasets)
    mesh = jax.tree.leaves(state)[0].sharding.mesh
    images = min(len(data.evaluation), config.evaluation.batch or 64 * mesh.size)
    rows = -(-images // mesh.size) * mesh.size
    step = make_evaluation_step(config, models.create(config.model), (data.mean, data.std), mesh)
    told = evaluate_on(step, *state.evaluated, data.evaluation, (images, rows), mesh, look=look)
    return told | {"samples": sealed.samples, "epoch": sealed.told["epoch"], "checkpoint": str(sealed.path)}, data


def export(workdir, output, which: str = "newest") -> dict:
    """Write the parameters and statistics that evaluation uses as a safetensors file, named by their paths in the tree.

    Its metadata hold the config as JSON, samples, epoch and accuracy. Returns {"output", "tensors", "bytes", "checkpoint"}.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    output = Path(output)
    if output.suffix != ".safetensors":
        raise ConfigError(f"--output: {str(output)!r} is not allowed; give a file that ends in .safetensors")
    state, config, sealed = restored(workdir, which)
    params, batch_stats = jax.device_get(state.evaluated)
    tensors = {}
    for name, tree in (("params", params), ("batch_stats", batch_stats)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            tensors["/".join([name, *(str(key.key) for key in path)])] = leaf
    told = {"config": json.dumps(dataclasses.asdict(config)), "samples": str(sealed.samples)}
    told |= {"epoch": f"{sealed.told['epoch']:g}", "accuracy": str(sealed.accuracy)}
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.is_dir():
        raise ConfigError(f"--output: {str(output)!r} is not allowed; it is a directory; give a file")
    temporary = output.with_name(output.name + ".tmp")
    try:
        save_file(tensors, temporary, told)
        temporary.replace(output)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(getattr(error, "errno", None) or errno.EIO, first_line(error), str(output)) from None
    size = output.stat().st_size
    return {"output": str(output), "tensors": len(tensors), "bytes": size, "checkpoint": str(sealed.path)}
