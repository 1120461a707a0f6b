"""Given parameters, from a file (`finetune.weights`) or a tree (`initial_params`), and the tree of a run."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxdp import models
from jaxdp.config import RESNET, Config
from jaxdp.errors import ConfigError, kind_of, plural
from jaxdp.models.weights import (
    NETWORK_FIELDS,
    TREES,
    NamedTensors,
    digest_of,
    listed,
    named_tensors,
    read,
    read_named,
)
from jaxdp.network import ROOT, InitialValues

FIELD, ARGUMENT = "finetune.weights", "initial_params"
Shape = tuple[int, ...]
TREE_HINT = 'give {"params": ..., "batch_stats": ...} of arrays, as `jaxdp.load_params` and `init` of a linen module return it'


def from_tree(config: Config, tree: Any) -> NamedTensors:
    """The arrays of `initial_params` by name. Raises ConfigError for a different structure, and beside a file of weights."""
    if config.finetune.weights is not None:
        reason = f"finetune.weights ({config.finetune.weights}) gives initial parameters too"
        raise ConfigError(ARGUMENT, reason=reason, hint="give one of them")
    if not isinstance(tree, Mapping) or "params" not in tree or not {*tree} <= {"params", "batch_stats"}:
        found = f"a mapping with {listed(map(str, tree))}" if isinstance(tree, Mapping) else kind_of(tree)
        raise ConfigError(ARGUMENT, reason=f"{found} is not a tree of parameters", hint=TREE_HINT)
    named = named_tensors(tree["params"], tree.get("batch_stats", {}))
    tensors = {name: _checked_array(name, leaf) for name, leaf in named.items()}
    return NamedTensors(ARGUMENT, tensors, digest_of(tensors), rooted=False)


def _checked_array(name: str, leaf: Any) -> np.ndarray:
    """A leaf of `initial_params` as float32. Raises ConfigError for other types and values that are not finite."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        hint = "give whole arrays, as jax.experimental.multihost_utils.process_allgather returns them with tiled=True"
        raise ConfigError(ARGUMENT, reason=f"{name} is on devices of several processes", hint=hint)
    array = np.asarray(leaf)
    if not jax.numpy.issubdtype(array.dtype, jax.numpy.floating):
        raise ConfigError(ARGUMENT, reason=f"{name} has dtype {array.dtype}", hint="convert it to float32")
    with np.errstate(over="ignore"):  # values beyond the range of float32 become infinite
        array = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(array).all():
        raise ConfigError(ARGUMENT, reason=f"{name} has values that are not finite", hint="give finite values")
    return array


def read_weights(
    config: Config, saved_digest: str | None = None, given: NamedTensors | None = None
) -> tuple[Config, NamedTensors | None]:
    """(the config with the digest of the given parameters, the parameters); None if the run starts from the seed.

    saved_digest: the digest that the run to be resumed stored. Such a run no longer needs the parameters: they are None if the
    file or `initial_params` is missing. given: the tensors of `initial_params`. Raises ConfigError if the file cannot be used,
    if the parameters have a different digest from the config or are of a different ResNet, and for frozen parts without
    parameters.
    """
    finetune = config.finetune
    is_absent = given is None and (finetune.weights is None or not os.path.exists(finetune.weights))
    if is_absent and finetune.digest in (None, saved_digest) and (saved_digest or finetune.weights is None):
        if finetune.frozen_stages and saved_digest is None:
            hint = f"use --{FIELD} FILE, or {ARGUMENT} in Python, or omit it"
            raise ConfigError("finetune.frozen_stages", finetune.frozen_stages, reason="requires finetune.weights", hint=hint)
        return with_digest(config, saved_digest), None
    if given is None and finetune.weights is None:
        reason = "it is of parameters that are not given"
        raise ConfigError("finetune.digest", finetune.digest, reason=reason, hint=f"give {FIELD}, or {ARGUMENT} in Python")
    weights = given or _read_file(config, str(finetune.weights))
    if finetune.digest not in (None, weights.digest):
        reason = f"its digest is {weights.digest}, but finetune.digest is {finetune.digest!r}"
        raise _error(config, reason, "use the file of that digest, or omit finetune.digest for a new run")
    return with_digest(config, weights.digest), weights


def _read_file(config: Config, path: str) -> NamedTensors:
    """The tensors of a file. Raises ConfigError for a file of a different ResNet."""
    if config.model.name != RESNET:
        return read_named(path, FIELD)
    weights = read(path, FIELD, blur_pool=config.model.blur_pool, new_classes=config.model.classes or 2)
    for name in [name for name in NETWORK_FIELDS if name != "classes"]:
        in_file, expected = getattr(weights.model, name), getattr(config.model, name)
        if in_file != expected:
            reason = f"it has the {name} {in_file!r}, but model.{name} is {expected!r}"
            flag = f"--model.{name.replace('_', '-')} {in_file}"
            raise ConfigError(FIELD, path, reason=reason, hint=f"use {flag}, or other weights")
    tensors = named_tensors(weights.params, weights.batch_stats)
    return NamedTensors(weights.path, tensors, weights.digest, (weights.describe(),))


def with_digest(config: Config, digest: str | None) -> Config:
    """The config with the digest of given parameters."""
    return dataclasses.replace(config, finetune=dataclasses.replace(config.finetune, digest=digest))


def missing_file_warnings(config: Config, weights: NamedTensors | None) -> list[str]:
    """A line about a run that is resumed without the parameters from which it began; [] for any other run."""
    finetune = config.finetune
    if finetune.digest is None or weights is not None:
        return []
    missing = f"{ARGUMENT} is not given" if finetune.weights is None else f"{finetune.weights} no longer exists"
    return [f"{missing}; the run does not need it to resume, and keeps its digest {finetune.digest}"]


def initial_values(config: Config, given: NamedTensors | None) -> InitialValues | None:
    """The given parameters and statistics that a run starts from; None if the config says that there are none.

    Tensors that the model lacks are omitted. Tensors that are not given are drawn from the seed, and so is a classifier for a
    different number of classes. A line lists all these. Raises ConfigError if the run lacks its parameters, for a tensor of a
    different shape, if no tensor matches, and for the initial bias of a given classifier.
    """
    if config.finetune.digest is None:
        return None
    if given is None:
        what, hint = (
            ("not given", "give it again") if config.finetune.weights is None else ("file not found", "restore the file")
        )
        raise _error(config, f"{what}, and the run has no checkpoint to resume from", hint)
    shapes = _shapes(config)
    full = {} if given.rooted else {without_root(name): name for name in shapes}
    tensors = {full.get(name, name): tensor for name, tensor in given.tensors.items()}
    used = {name: tensor for name, tensor in tensors.items() if name in shapes}
    if not used:
        reason = f"no tensor has a name of the model's: there is {min(tensors)!r}" if tensors else "there are no tensors"
        raise _error(config, reason, f"names of the model are such as {min(shapes)!r}")
    different = {name for name, tensor in used.items() if tensor.shape != shapes[name]}
    asks_for_bias = config.model.classifier_bias != "zero"
    more = _shapes_for_another_class(config) if different or asks_for_bias else shapes
    of_classes = {name for name, shape in shapes.items() if more.get(name) != shape}
    for_other_classes = {n for n in different & of_classes if _differ_in_classes(used[n].shape, shapes[n], more.get(n))}
    if wrong := sorted(different - for_other_classes):
        reason = f"{wrong[0]} has shape {used[wrong[0]].shape}, but in the model {shapes[wrong[0]]}"
        raise _error(config, reason, "give tensors of this model, or without those that shall follow the seed")
    if asks_for_bias and not different and of_classes <= used.keys():
        reason = f"not used: the run starts with the classifier of {given.source}"
        raise ConfigError("model.classifier_bias", config.model.classifier_bias, reason=reason, hint="omit it")
    words = [f"{len(used) - len(different)} of the model's {plural(len(shapes), 'tensor')}", *given.notes]
    for names, what in (
        (different, f"new for {plural(config.model.class_count, 'class')}"),
        (shapes.keys() - used.keys(), "not given, so from the seed"),
        (tensors.keys() - shapes.keys(), "not in the model, so left out"),
    ):
        words += [f"{what}: {listed(names)}"] * bool(names)
    used = {name: tensor for name, tensor in used.items() if name not in different}
    return InitialValues(used, f"starting from {given.source} ({'; '.join(words)})")


def _error(config: Config, reason: str, hint: str) -> ConfigError:
    """An error about the given parameters."""
    path = config.finetune.weights
    return ConfigError(*(ARGUMENT,) if path is None else (FIELD, path), reason=reason, hint=hint)


def _shapes(config: Config) -> dict[str, Shape]:
    """The shapes of the model's tensors by name."""
    shape = (config.data.image_size, config.data.image_size, 3)
    trees = models.initial_shapes(models.create(config.model, platform="any"), shape)
    return {name: leaf.shape for name, leaf in named_tensors(*trees).items()}


def _shapes_for_another_class(config: Config) -> dict[str, Shape]:
    """The shapes with one class more, which shows the shapes that follow from the number of classes."""
    more = dataclasses.replace(config.model, classes=config.model.class_count + 1)
    try:
        return _shapes(dataclasses.replace(config, model=more))
    except ConfigError:  # the model allows only its own number of classes
        return _shapes(config)


def _differ_in_classes(given: Shape, shape: Shape, more: Shape | None) -> bool:
    """Whether a given shape differs from the model's only in dimensions that follow from the number of classes."""
    if more is None or not len(given) == len(shape) == len(more):
        return False
    return all(found == own or own != other for found, own, other in zip(given, shape, more, strict=True))


def without_root(name: str) -> str:
    """The name of a tensor without the first part, which registered models have."""
    for tree in TREES:
        name = name.replace(f"{tree}{ROOT}/", tree, 1) if name.startswith(f"{tree}{ROOT}/") else name
    return name


def module_variables(params: dict, batch_stats: dict) -> dict[str, Any]:
    """The trees of a state as the module has them: without the first part of names, and without stages."""
    named = {without_root(name): leaf for name, leaf in named_tensors(params, batch_stats).items()}
    return {"params": {}, "batch_stats": {}} | unflatten_dict(named, sep="/")
