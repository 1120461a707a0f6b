"""Listing, choosing and loading the checkpoints of a run directory."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxdp import models
from jaxdp.checkpoint.listing import (
    CHECKPOINT_NAMES,
    candidates,
    checkpoint_paths,
    named_checkpoints,
    remove,
    rename_for_removal,
)
from jaxdp.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    CorruptCheckpoint,
    Manifest,
    read_manifest,
    verify_files,
)
from jaxdp.checkpoint.orbax_io import CheckpointMismatch, load_state, verify_checkpoint
from jaxdp.config import Config, Data, Preprocessing, Storage
from jaxdp.config_words import evaluation_words
from jaxdp.distributed import runtime
from jaxdp.errors import ConfigError, print_safe
from jaxdp.files import expand_user, is_url
from jaxdp.models import preprocessing, weights
from jaxdp.models.finetune import module_variables
from jaxdp.parallel.mesh import choose_shape, make_mesh
from jaxdp.setup.run_dir import CHECKPOINTS, lock_run_dir, run_config
from jaxdp.training.state import TrainState, abstract_state, from_host
from jaxdp.validation import changes, validate, with_fields
from jaxdp.xla.jax_options import own_options

WEIGHTS = "--weights"


class LoadedRun(NamedTuple):
    """A run's state, restored from the checkpoint of `manifest` onto this machine's devices.

    opt_state and loss_scale of the state are None, unless the whole state was asked for.
    """

    state: TrainState
    config: Config
    manifest: Manifest


def list_checkpoints(workdir: str | Path) -> list[dict[str, Any]]:
    """All checkpoints of a run, oldest first: path, samples, epoch, steps, accuracy, bytes, error (None if valid), and names.

    names: names of `choose_checkpoint` that mean it, such as "best". Reads and verifies every byte of every checkpoint. Raises
    ConfigError if `workdir` holds no run.
    """
    workdir = expand_user(workdir, "--workdir")
    metric = run_config(workdir).stop.metric
    pairs = _list_remote(workdir) if is_url(workdir) else _list_local(Path(workdir))
    newest_first = [manifest for row, manifest in reversed(pairs) if manifest and row["error"] is None]
    samples_of = named_checkpoints(newest_first, metric)
    return [row | {"names": [name for name in samples_of if samples_of[name] == row["samples"]]} for row, _ in pairs]


def keep_checkpoints(workdir: str | Path, names: Sequence[str]) -> list[int]:
    """Delete all checkpoints of a run, corrupt ones too, but those that `names` mean; returns the samples of the deleted ones.

    names: as of `choose_checkpoint`; each must be valid. Raises ConfigError if one is not, while a process trains in the
    directory, for a URL, and if a checkpoint cannot be deleted.
    """
    path = Path(expand_user(workdir, "--workdir"))
    if is_url(workdir):
        raise ConfigError("--keep", ",".join(names), reason="checkpoints at a URL are not deleted", hint="delete them there")
    run_config(path)
    with lock_run_dir(path):
        kept = {choose_checkpoint(path, name, "--keep").samples for name in names}
        expired = [found for found in checkpoint_paths(path / CHECKPOINTS) if int(found.name) not in kept]
        try:
            for found in expired:
                remove(rename_for_removal(found))
        except OSError as error:
            raise ConfigError("--workdir", str(workdir), reason=f"{found.name} cannot be deleted: {error.strerror}") from None
    return [int(found.name) for found in expired]


def _list_local(workdir: Path) -> list[tuple[dict[str, Any], Manifest | None]]:
    """Rows of `list_checkpoints`, without names, and valid manifests."""
    rows = []
    for path in reversed(checkpoint_paths(workdir / CHECKPOINTS)):
        manifest, error = None, None
        try:
            manifest = read_manifest(path)
            verify_checkpoint(manifest)
        except CheckpointError as raised:
            if not os.path.lexists(path):  # removed meanwhile by a running training process
                continue
            error = str(raised)
        rows.append((_row(str(path), int(path.name), manifest, error=error), manifest))
    return rows


def _list_remote(url: str) -> list[tuple[dict[str, Any], Manifest | None]]:
    """`_list_local` for a run at a URL; downloads every checkpoint, one at a time."""
    from jaxdp.cloud.local import temporary_directory
    from jaxdp.cloud.location import ObjectNotFoundError, storage_errors
    from jaxdp.cloud.remote_run import list_manifests

    rows = []
    remote, manifests = list_manifests(url)
    for name, found in reversed(manifests.items()):
        manifest, error = (None, found) if isinstance(found, str) else (found, None)
        if manifest is not None:
            with temporary_directory(Storage()) as folder, storage_errors(url, "--workdir"):
                try:
                    verify_checkpoint(remote.download_checkpoint(name, Path(folder)))
                except CheckpointError as raised:
                    error = str(raised)
                except ObjectNotFoundError as raised:
                    if not remote.location.sizes(name.path(MANIFEST)):
                        continue  # removed meanwhile by a training process
                    error = f"{raised.filename} is missing"
        rows.append((_row(remote.url_of(name), name.samples, manifest, error=error), manifest))
    return rows


def _row(path: str, samples: int, manifest: Manifest | None, *, error: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = dict.fromkeys(("epoch", "steps", "accuracy", "bytes"))
    if manifest is not None:
        steps = manifest.metadata["progress"]["steps"]
        facts = {"epoch": manifest.epoch, "steps": steps, "accuracy": manifest.accuracy, "bytes": manifest.num_bytes}
    return {"path": path, "samples": samples, **facts, "error": error}


def choose_checkpoint(workdir: str | Path, checkpoint: str = "result", field: str = "--checkpoint") -> Manifest:
    """The checkpoint named "result", "newest", "best" (by `stop.metric`), or by its number of samples.

    "result": what result.json describes, the newest, or with early stopping the best that the newest one knows. Names skip
    invalid checkpoints and report them on stderr. Raises ConfigError, of `field`, if there is no such checkpoint.
    """
    folder = Path(expand_user(workdir, "--workdir")) / CHECKPOINTS
    if checkpoint not in CHECKPOINT_NAMES:
        return _checkpoint_at(folder, checkpoint, field)
    found = _read_all(folder)
    metric = run_config(workdir).stop.metric if checkpoint == "best" else ""
    errors = [one for one in found.values() if isinstance(one, str) and checkpoint == "best"]  # it could be one of these
    for samples in candidates(found, checkpoint, metric, field=field):
        path = folder / str(samples)
        manifest = found.get(samples, f"{path} is missing")
        try:
            if isinstance(manifest, str):
                raise CheckpointError(manifest)
            verify_files(manifest)
        except CheckpointError as error:
            if samples not in found or os.path.lexists(path):  # not removed meanwhile by a running training process
                errors.append(str(error))
            continue
        if errors:
            message = f"jaxdp: using {path} instead of the {checkpoint} checkpoint: {'; '.join(errors)}"
            print_safe(message, sys.stderr)
        return manifest
    if not errors:
        run_config(workdir)  # raises ConfigError if there is no run
    raise ConfigError("--workdir", str(workdir), reason="no valid checkpoint found", hint="list them with `jaxdp checkpoints`")


def _read_all(folder: Path) -> dict[int, Manifest | str]:
    """Samples -> manifest, or why it cannot be read, newest first."""
    found: dict[int, Manifest | str] = {}
    for path in checkpoint_paths(folder):
        try:
            found[int(path.name)] = read_manifest(path)
        except CheckpointError as error:
            if os.path.lexists(path):  # not removed meanwhile by a running training process
                found[int(path.name)] = str(error)
    return found


def _checkpoint_at(folder: Path, samples: str, field: str) -> Manifest:
    names = [path.name for path in checkpoint_paths(folder)]
    if samples not in names:
        available = ", ".join(names) or "none"
        raise ConfigError(
            field,
            samples,
            reason="checkpoint not found",
            hint=f"use {', '.join(CHECKPOINT_NAMES)}, or one of: {available}",
        )
    try:
        return read_manifest(folder / samples)
    except CorruptCheckpoint as error:
        raise ConfigError(field, samples, reason=str(error), hint="use another checkpoint") from None


@own_options()
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


@contextmanager
def open_checkpoint(workdir: str | Path, checkpoint: str = "result") -> Iterator[Manifest]:
    """The checkpoint of `choose_checkpoint` for a run in a directory or at a URL, from which it is copied for the context."""
    if not is_url(workdir):
        yield choose_checkpoint(workdir, checkpoint)
        return
    from jaxdp.cloud.local import temporary_directory
    from jaxdp.cloud.remote_run import download_checkpoint

    config = run_config(workdir)
    with temporary_directory(config.storage) as folder:
        place, metric = Path(folder), config.stop.metric
        yield download_checkpoint(str(workdir), "--workdir", place, checkpoint=checkpoint, metric=metric)


@own_options()
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
    trees = state.evaluated if averaged else (state.params, state.batch_stats)
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
    devices = runtime.start(config.mesh, cache=True)
    mesh = make_mesh(*choose_shape(config.mesh, len(devices), jax.process_count()))
    name = manifest.path.name
    try:
        state = load_state(manifest, _abstract(config, mesh, whole=whole))
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


class LoadedWeights(NamedTuple):
    """A file of weights on this machine's devices. evaluated: (params, batch_stats); words: network, digest, preprocessing."""

    evaluated: tuple[dict, dict]
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
    return validate(Config(name="weights", data=data, model=model))


@own_options()
def load_weights(path: str | Path, config: Config) -> LoadedWeights:
    """Read a file of weights onto all devices of this machine. config: from `weights_config`, with changes.

    Raises ConfigError for a file that cannot be used, and for one of another network than the config's.
    """
    config, read = validate(config), weights.read(path, WEIGHTS, blur_pool=config.model.blur_pool)
    if weights.network_json(read.model) != weights.network_json(config.model):
        reason = f"it is a {read.describe()}, and not the network of the options"
        raise ConfigError(WEIGHTS, str(path), reason=reason, hint="omit the model options")
    devices = runtime.start(config.mesh, cache=True)
    mesh = make_mesh(*choose_shape(config.mesh, len(devices), jax.process_count()))
    params, batch_stats = (jax.tree.map(partial(from_host, mesh=mesh), tree) for tree in (read.params, read.batch_stats))
    words = f"{path}: {read.describe()}, digest {read.digest}, {evaluation_words(config)}"
    return LoadedWeights((params, batch_stats), mesh, config, words)


def inference_batch(examples: int, mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """(images per step, rows of the padded batch) for `examples` images; the devices divide the rows evenly."""
    images = min(examples, 64 * mesh.size)
    return images, -(-images // mesh.size) * mesh.size
