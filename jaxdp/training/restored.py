"""What can be done with the checkpoints that a run has kept, beside going on from them: list, evaluate, export."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np

from jaxdp import models
from jaxdp.config import RESNET, Config, ConfigError
from jaxdp.data.sources import IMAGENET_MEAN, IMAGENET_STD, open_datasets, pixel_statistics
from jaxdp.models import weights
from jaxdp.models.torch_weights import to_torch
from jaxdp.parallel import distributed
from jaxdp.parallel.mesh import choose_shape, make_mesh
from jaxdp.training import checkpoint, seal
from jaxdp.training.evaluation import Confusion, make_evaluation_step
from jaxdp.training.evaluation import evaluate as evaluate_on
from jaxdp.training.state import TrainState, abstract_state
from jaxdp.training.workdir import CHECKPOINTS, CLASSES, class_names, run_config
from jaxdp.validation import changes, from_dict, validate

FORMATS = ("jaxdp", "torchvision", "timm")


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
    """The checkpoint that `which` names: newest, best (by accuracy), or its samples. Raises ConfigError where there is none.

    Damaged ones are passed over, and named on stderr with the one that is used instead.
    """
    folder = Path(workdir) / CHECKPOINTS
    if which not in ("newest", "best"):
        return _named(folder, which)
    found, damage = _sealed(folder)
    if which == "best":
        scored = seal.by_accuracy(found)
        if found and not scored:
            raise ConfigError("--checkpoint: 'best' is not allowed; none was saved right after an evaluation; give newest")
        found = scored
    for one in found:
        try:
            seal.check_files(one)
        except (seal.Damaged, seal.Unreadable) as error:
            if one.path.exists():
                damage[one.path] = str(error)
            continue
        preferred = [reason for path, reason in damage.items() if which == "best" or int(path.name) > one.samples]
        if preferred:
            print(f"jaxdp: {one.path} is used, not the {which}: {'; '.join(preferred)}", file=sys.stderr, flush=True)
        return one
    raise ConfigError(f"--workdir: {str(workdir)!r} is not allowed; it holds no sound checkpoint (see jaxdp checkpoints)")


def _sealed(folder: Path) -> tuple[list[seal.Sealed], dict[Path, str]]:
    """(the checkpoints with a sound seal, the newest first; what is wrong with the seals of the others)."""
    found, damage = [], {}
    for path in seal.directories(folder):
        try:
            found.append(seal.read(path))
        except (seal.Damaged, seal.Unreadable) as error:
            if path.exists():  # else the run has removed it since
                damage[path] = str(error)
    return found, damage


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
        differing = [one for one in changes(from_dict(sealed.told["config"]), config) if one.startswith("model.")]
        other = differing and isinstance(error, checkpoint.Unfit)
        reason = f"it is of another model ({'; '.join(differing)}); leave that out" if other else error
        raise ConfigError(f"--checkpoint: {sealed.path.name!r} is not allowed; {reason}") from None
    return state, config, sealed


def evaluate(config: Config | None, workdir, which: str = "newest", datasets=None) -> dict:
    """Accuracy, top-5, loss and number of the held-out images for a checkpoint, with its samples, epoch and path.

    config: None for the run's own; another may name other data, or another evaluation split. datasets: as for `jaxdp.train`.
    Raises ConfigError where the run, the checkpoint or the data are not there.
    """
    return _evaluated(config, workdir, which, datasets)


def confusion(config: Config | None, workdir, which: str = "newest", datasets=None) -> tuple[dict, np.ndarray, list[str]]:
    """(what `evaluate` returns, counts int64 [classes, classes] of the held-out images by label (rows) and predicted class, the
    names of the classes). Every image is counted once. The arguments and errors are those of `evaluate`."""
    config = run_config(workdir) if config is None else config
    counts = Confusion(config.model.classes)
    told = _evaluated(config, workdir, which, datasets, counts)
    return told, counts.counts, class_names(workdir, config.model.classes)


def _evaluated(config: Config | None, workdir, which: str, datasets, look=None):
    state, config, sealed = restored(workdir, which, config)
    data = open_datasets(config, datasets)
    _check_classes(workdir, config, data.classes)
    mesh = jax.tree.leaves(state)[0].sharding.mesh
    step = make_evaluation_step(config, models.create(config.model), (data.mean, data.std), mesh)
    examples = len(data.evaluation)
    told = evaluate_on(step, *state.evaluated, data.evaluation, batch_of(config, examples, mesh), mesh, look=look)
    return told | {"samples": sealed.samples, "epoch": sealed.told["epoch"], "checkpoint": str(sealed.path)}


def _check_classes(workdir, config: Config, classes) -> None:
    """Raise ConfigError where the data's classes stand in another order than those that the run was trained on."""
    if not classes or not (Path(workdir) / CLASSES).exists():
        return
    for number, (then, now) in enumerate(zip(class_names(workdir, config.model.classes), classes, strict=False)):
        if then != now:
            raise ConfigError(
                f"data.directory: {config.data.directory!r} is not allowed; its class {number} is {now!r}, and the run was "
                f"trained with {then!r} there (see its {CLASSES}); give images of the same classes"
            )


def batch_of(config: Config, examples: int, mesh) -> tuple[int, int]:
    """(images that a step counts, rows of its batch) where no training gives them."""
    images = min(examples, config.evaluation.batch or 64 * mesh.size)
    return images, -(-images // mesh.size) * mesh.size


def export(workdir, output, which: str = "newest", form: str = "jaxdp", overwrite: bool = False) -> dict:
    """Write the parameters and statistics that evaluation uses as a safetensors file.

    form: "jaxdp", named by their paths in the tree; "torchvision" or "timm", with the names and layouts that these share. Its
    metadata hold the config as JSON, samples, epoch and accuracy. Returns {"output", "tensors", "bytes", "checkpoint",
    "format", "remarks"}. Raises ConfigError where the run or the checkpoint is not there, or a file would be overwritten.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format: {form!r} is not allowed; give {', '.join(FORMATS)}")
    output = weights.writable(output, overwrite)
    state, config, sealed = restored(workdir, which)
    if form != "jaxdp" and config.model.name != RESNET:
        raise ConfigError(f"--format: {form!r} is not allowed; the run's model is {config.model.name!r}; give jaxdp")
    tensors, remarks = weights.named(*jax.device_get(state.evaluated)), _pixels(config)
    told = {"config": json.dumps(dataclasses.asdict(config)), "model": weights.described(config.model)}
    told |= {"samples": str(sealed.samples), "epoch": f"{sealed.told['epoch']:g}", "accuracy": str(sealed.accuracy)}
    if form != "jaxdp":
        tensors = to_torch(tensors, sealed.told["progress"]["steps"])
        told["format"] = "pt"  # by which some readers know PyTorch's layouts
        remarks = _remarks(config, form) + remarks
    size = weights.save(output, tensors, told)
    told = {"output": str(output), "tensors": len(tensors), "bytes": size, "checkpoint": str(sealed.path)}
    return told | {"format": form, "remarks": remarks}


def _remarks(config: Config, form: str) -> list[str]:
    """What keeps a network of torchvision's or timm's from loading the weights."""
    model, different = config.model, []
    if model.stem != "imagenet":
        different.append("conv1 is 3x3 with stride 1 and no max pooling follows (model.stem 'small')")
    if model.width != 64:
        different.append(f"the first stage has {model.width} channels, not 64 (model.width)")
    return [f"resnet{model.depth} of {form} does not load it as it is: {'; '.join(different)}"] if different else []


def _pixels(config: Config) -> list[str]:
    """How images are to be normalised for the network, where it is not as for ImageNet's."""
    mean, std = pixel_statistics(config)
    if (mean, std) == (IMAGENET_MEAN, IMAGENET_STD):
        return []
    return [f"it expects mean {mean / 255:.4g} and standard deviation {std / 255:.4g} of pixels from 0 to 1, not ImageNet's"]
