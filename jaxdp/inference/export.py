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
from jaxdp.files import write_output
from jaxdp.inference import export_onnx
from jaxdp.inference.export_stablehlo import to_stablehlo
from jaxdp.inference.load_run import LoadedRun, load_run
from jaxdp.inference.serving import served_model
from jaxdp.metrics import bare
from jaxdp.models import preprocessing, weights
from jaxdp.models.torch_weights import to_torch
from jaxdp.setup.run_dir import trained_classes
from jaxdp.xla.jax_options import jaxdp_jax_config

SUFFIXES = dict.fromkeys(("jaxdp", "torchvision", "timm"), ".safetensors") | {"stablehlo": ".jaxexport", "onnx": ".onnx"}
# Values of fields that timm's ResNets have; torchvision's have the first ones.
KNOWN = {
    "stem": ("imagenet", "deep"),
    "shortcut": ("strided", "pooled"),
    "blur_pool": ("none",),
    "width": (64,),
}


@jaxdp_jax_config()
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
    libraries; the file's metadata contain the config and the class names as JSON, samples, epoch and accuracy. "stablehlo"
    and "onnx" are whole models, see docs/weights.md. dtype: of the activations of "stablehlo".

    Returns {"output", "bytes", "checkpoint", "format", "warnings"}, with "tensors" (their number) for weights and "metadata"
    for models. Raises ConfigError if the run or the checkpoint cannot be used or exported in this format, or if the output file
    exists.
    """
    if format not in SUFFIXES:
        raise ConfigError("--format", format, reason="unknown format", hint=f"use one of: {', '.join(SUFFIXES)}")
    if format != "stablehlo" and dtype != "float32":
        raise ConfigError("--dtype", dtype, reason="used only with --format stablehlo", hint="omit it")
    if format == "onnx":
        export_onnx.check_installed()
    output = weights.check_output_path(output, overwrite, suffix=SUFFIXES[format])
    loaded = load_run(workdir, checkpoint)
    name = loaded.config.model.name
    if format not in ("jaxdp", "stablehlo") and name != RESNET:
        hint = "use stablehlo" if format == "onnx" else "use jaxdp"
        raise ConfigError("--format", format, reason=f"the run's model is {name!r}, not {RESNET!r}", hint=hint)
    if SUFFIXES[format] == ".safetensors":
        result = _export_weights(loaded, output, format, classes=trained_classes(workdir))
    else:
        served = served_model(workdir, loaded, format=format, dtype=dtype)
        data = to_stablehlo(served) if format == "stablehlo" else export_onnx.to_onnx(served)
        write_output(output, data)
        result = {"metadata": served.metadata, "bytes": len(data), "warnings": []}
    return {"output": str(output), "checkpoint": loaded.manifest.location, "format": format, **result}


def _export_weights(loaded: LoadedRun, output: Path, format: str, *, classes: list[str] | None) -> dict[str, Any]:
    """Write a safetensors file. classes: see `trained_classes`. Returns its part of the result of `export`."""
    state, config, manifest = loaded
    tensors, warnings = weights.named_tensors(*jax.device_get(state.eval_variables)), _pixel_warnings(config)
    name = config.first_metric
    metadata = {
        "config": json.dumps(dataclasses.asdict(config)),
        "model": weights.network_json(config.model),
        "task": config.task,
        preprocessing.METADATA: json.dumps(preprocessing.as_dict(preprocessing.of_run(config, *pixel_stats(config)))),
        "samples": str(manifest.samples),
        "epoch": f"{manifest.epoch:g}",
        bare(name): str(manifest.evaluation.get(name)),
    }
    if classes is not None:
        metadata[preprocessing.CLASSES] = json.dumps(classes)
    if format != "jaxdp":
        tensors = to_torch(tensors, manifest.metadata["progress"]["steps"])
        metadata["format"] = "pt"  # some readers expect this for PyTorch's layouts
        warnings = _network_warnings(config, format) + warnings
    return {"tensors": len(tensors), "bytes": weights.save(output, tensors, metadata), "warnings": warnings}


def _network_warnings(config: Config, format: str) -> list[str]:
    """Which network of torchvision or timm computes the same, unless it is the plain ResNet of this depth."""
    model = config.model
    differences = [
        f"model.{name} {value!r}"
        for name, known in KNOWN.items()
        if (value := getattr(model, name)) not in (known if format == "timm" else known[:1])
    ]
    if differences:
        return [f"no ResNet-{model.depth} of {format} computes the same as the run's network, with {', '.join(differences)}"]
    forms = {("deep", "strided"): "c", ("deep", "pooled"): "d", ("imagenet", "pooled"): " with avg_down=True"}
    form = forms.get((model.stem, model.shortcut))
    return [f"the file is for timm's resnet{model.depth}{form}"] if form else []


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
