"""`jaxdp export`: write the weights of a checkpoint to a safetensors file, or its network for serving."""

import dataclasses
import json
from typing import Literal

from jaxdp.cli.options import Switch
from jaxdp.flags import parse
from jaxdp.recipes import register_from


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the weights and statistics that evaluation uses to a safetensors file, or the network for programs without jaxdp.

    Examples:
      jaxdp export --workdir runs/digits --checkpoint best --output digits.safetensors
      jaxdp export --workdir runs/digits --format torchvision --output digits-torch.safetensors
      jaxdp export --workdir runs/digits --format stablehlo --output digits.jaxexport
    """

    output: str
    """File to write, ending in .safetensors, .jaxexport (stablehlo) or .onnx"""
    workdir: str
    """Working directory of the run"""
    checkpoint: str = "newest"
    """Checkpoint to export: newest, best (by accuracy), or its number of samples"""
    format: Literal["jaxdp", "torchvision", "timm", "stablehlo", "onnx"] = "jaxdp"
    """Weights with names and layouts of jaxdp, or of torchvision and timm, which are the same; or a model for serving:
    stablehlo, read by JAX, or onnx (ResNet; extra onnx)"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the activations, and of the weights in computations, of a stablehlo model"""
    overwrite: Switch = False
    """Overwrite an existing output file"""
    config: str | None = None
    """Recipe file (.py) that registers the model or strategy of the run, if they are not jaxdp's"""
    json: Switch = False
    """Output as one JSON document on stdout"""


def run(arguments: list[str], program: str) -> None:
    options = parse(Export, arguments, program)
    register_from(options.config)
    from jaxdp.inference.export import export

    result = export(
        options.workdir,
        options.output,
        options.checkpoint,
        format=options.format,
        dtype=options.dtype,
        overwrite=options.overwrite,
    )
    if options.json:
        print(json.dumps(result, indent=2))
        return
    content = f"{result['tensors']} tensors" if "tensors" in result else f"{result['metadata']['network']} ({options.format})"
    print(f"{result['output']}: {content}, {result['bytes']:,} bytes, from {result['checkpoint']}")
    for warning in result["warnings"]:
        print(warning)
