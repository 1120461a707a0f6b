"""Exporting a checkpoint's weights as a safetensors file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdp.choices import SOURCES
from jaxdp.config import RESNET, Config
from jaxdp.data.sources import pixel_stats
from jaxdp.errors import ConfigError
from jaxdp.inference.load_run import load_run
from jaxdp.models import preprocessing, weights
from jaxdp.models.torch_weights import to_torch

FORMATS = ("jaxdp", "torchvision", "timm")


def export(
    workdir: str | Path,
    output: str | Path,
    checkpoint: str = "result",
    *,
    format: str = "jaxdp",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the parameters and batch statistics that evaluation uses to a safetensors file.

    checkpoint: result (the newest, or with early stopping the best), newest, best, or its number of samples. format: "jaxdp"
    names tensors by their tree paths; "torchvision" and "timm" use the names and layouts of those libraries. The file's
    metadata contain the config as JSON, samples, epoch and accuracy.

    Returns {"output", "tensors", "bytes", "checkpoint", "format", "warnings"}. Raises ConfigError if the run or the checkpoint
    cannot be used or the output file exists.
    """
    if format not in FORMATS:
        raise ConfigError("--format", format, reason="unknown format", hint=f"use one of: {', '.join(FORMATS)}")
    output = weights.check_output_path(output, overwrite)
    state, config, manifest = load_run(workdir, checkpoint)
    if format != "jaxdp" and config.model.name != RESNET:
        raise ConfigError(
            "--format", format, reason=f"the run's model is {config.model.name!r}, not {RESNET!r}", hint="use jaxdp"
        )
    tensors, warnings = weights.named_tensors(*jax.device_get(state.evaluated)), _pixel_warnings(config)
    metadata = {
        "config": json.dumps(dataclasses.asdict(config)),
        "model": weights.network_json(config.model),
        preprocessing.METADATA: json.dumps(preprocessing.as_dict(preprocessing.of_run(config, *pixel_stats(config)))),
        "samples": str(manifest.samples),
        "epoch": f"{manifest.epoch:g}",
        "accuracy": str(manifest.accuracy),
    }
    if format != "jaxdp":
        tensors = to_torch(tensors, manifest.metadata["progress"]["steps"])
        metadata["format"] = "pt"  # some readers expect this for PyTorch's layouts
        warnings = _architecture_warnings(config, format) + _blur_warnings(config, format) + warnings
    return {
        "output": str(output),
        "tensors": len(tensors),
        "bytes": weights.save(output, tensors, metadata),
        "checkpoint": manifest.location,
        "format": format,
        "warnings": warnings,
    }


def _architecture(config: Config) -> str:
    """timm's name of the network."""
    model = config.model
    return f"{'se' * model.squeeze_excitation}resnet{'blur' * (model.blur_pool == 'activations')}{model.depth}"


def _blur_warnings(config: Config, format: str) -> list[str]:
    """Which network of the library computes the same as a network with BlurPool; [] without."""
    form, name = config.model.blur_pool, _architecture(config)
    if form == "none":
        return []
    if form == "activations" and format == "timm":
        return [f"load the file with BlurPool ({name}); names and shapes are the same without, and the predictions others"]
    return [f"{format} has no network with this BlurPool (model.blur_pool {form!r}): it loads the file, but predicts otherwise"]


def _architecture_warnings(config: Config, format: str) -> list[str]:
    """Why the ResNet of torchvision or timm cannot load the weights unchanged; [] if it can."""
    model, differences = config.model, []
    if model.stem != "imagenet":
        differences.append("conv1 is 3x3 with stride 1, without max pooling (model.stem 'small')")
    if model.width != 64:
        differences.append(f"the first ResNet stage has {model.width} channels, not 64 (model.width)")
    if model.squeeze_excitation and format == "torchvision":
        differences.append("blocks have squeeze-and-excitation (model.squeeze_excitation), which timm's seresnets have")
    return (
        [f"{_architecture(config)} of {format} cannot load the file unchanged: {'; '.join(differences)}"] if differences else []
    )


def _pixel_warnings(config: Config) -> list[str]:
    """The normalization of input images, if it is not ImageNet's."""
    mean, std = pixel_stats(config)
    imagenet = SOURCES["imagenet2012"]
    if (mean, std) == (imagenet.mean, imagenet.std):
        return []
    mean_text, std_text = (", ".join(f"{value / 255:.4g}" for value in np.ravel(stat)) for stat in (mean, std))
    return [
        f"the network expects pixels in [0, 1] normalized with mean {mean_text} and standard deviation {std_text}, "
        "not with ImageNet's"
    ]
