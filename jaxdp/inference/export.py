"""Exporting a checkpoint: its weights as a safetensors file, or the network for serving."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdp.choices import SOURCES
from jaxdp.config import RESNET, Config
from jaxdp.data.datasets import pixel_stats
from jaxdp.errors import ConfigError
from jaxdp.files import check_output, write_output
from jaxdp.inference import export_onnx
from jaxdp.inference.export_stablehlo import to_stablehlo
from jaxdp.inference.load_run import LoadedRun, load_run
from jaxdp.inference.serving import served_model
from jaxdp.models import preprocessing, weights
from jaxdp.models.torch_weights import to_torch
from jaxdp.xla.jax_options import own_options

WEIGHTS_FORMATS = ("jaxdp", "torchvision", "timm")
SERVING_SUFFIXES = {"stablehlo": ".jaxexport", "onnx": ".onnx"}
FORMATS = (*WEIGHTS_FORMATS, *SERVING_SUFFIXES)


@own_options()
def export(
    workdir: str | Path,
    output: str | Path,
    checkpoint: str = "result",
    *,
    format: str = "jaxdp",
    dtype: str = "float32",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the parameters and batch statistics that evaluation uses, or the network that they belong to.

    checkpoint: result (the newest, or with early stopping the best), newest, best, or its number of samples. format: "jaxdp"
    names tensors of a safetensors file by their tree paths, "torchvision" and "timm" use the names and layouts of those
    libraries; the file's metadata contain the config as JSON, samples, epoch and accuracy. "stablehlo" and "onnx" are whole
    models, see docs/weights.md. dtype: of the activations of "stablehlo".

    Returns {"output", "bytes", "checkpoint", "format", "warnings"}, with "tensors" (their number) for weights and "metadata"
    for models. Raises ConfigError if the run or the checkpoint cannot be used or exported in this format, or if the output file
    exists.
    """
    if format not in FORMATS:
        raise ConfigError("--format", format, reason="unknown format", hint=f"use one of: {', '.join(FORMATS)}")
    if format != "stablehlo" and dtype != "float32":
        raise ConfigError("--dtype", dtype, reason="used only with --format stablehlo", hint="omit it")
    if format == "onnx":
        export_onnx.check_installed()
    output = _check_output(output, format, overwrite)
    loaded = load_run(workdir, checkpoint)
    name = loaded.config.model.name
    if format not in ("jaxdp", "stablehlo") and name != RESNET:
        hint = "use stablehlo" if format == "onnx" else "use jaxdp"
        raise ConfigError("--format", format, reason=f"the run's model is {name!r}, not {RESNET!r}", hint=hint)
    if format in SERVING_SUFFIXES:
        served = served_model(workdir, loaded, format=format, dtype=dtype)
        data = to_stablehlo(served) if format == "stablehlo" else export_onnx.to_onnx(served)
        write_output(output, data)
        result = {"metadata": served.metadata, "bytes": len(data), "warnings": []}
    else:
        result = _export_weights(loaded, output, format)
    return {"output": str(output), "checkpoint": loaded.manifest.location, "format": format, **result}


def _check_output(output: str | Path, format: str, overwrite: bool) -> Path:
    if format in WEIGHTS_FORMATS:
        return weights.check_output_path(output, overwrite)
    suffix = SERVING_SUFFIXES[format]
    if Path(output).suffix != suffix:
        raise ConfigError("--output", str(output), reason=f"must end in {suffix} with --format {format}")
    return check_output(output, overwrite)


def _export_weights(loaded: LoadedRun, output: Path, format: str) -> dict[str, Any]:
    """Write a safetensors file. Returns its part of the result of `export`."""
    state, config, manifest = loaded
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
    return {"tensors": len(tensors), "bytes": weights.save(output, tensors, metadata), "warnings": warnings}


def _architecture(config: Config) -> str:
    """timm's name of the network."""
    model = config.model
    form = {("deep", "strided"): "c", ("deep", "pooled"): "d"}.get((model.stem, model.shortcut), "")
    return f"{'se' * model.squeeze_excitation}resnet{'blur' * (model.blur_pool == 'activations')}{model.depth}{form}"


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
    if model.stem == "small":
        differences.append("conv1 is 3x3 with stride 1, without max pooling (model.stem 'small')")
    if model.stem == "deep" and format == "torchvision":
        differences.append("conv1 is three 3x3 convolutions (model.stem 'deep'), as in timm's resnet50d")
    if model.shortcut == "pooled" and (format == "torchvision" or model.stem != "deep"):
        differences.append("shortcuts average (model.shortcut 'pooled'), which timm's avg_down=True does")
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
