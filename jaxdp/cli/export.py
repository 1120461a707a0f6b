"""`jaxdp export`: write the weights of a checkpoint to a safetensors file, its network for serving, or a model card."""

import dataclasses
import json
from typing import Any, Literal

from jaxdp.cli.options import CheckpointName, Switch
from jaxdp.errors import ConfigError, print_safe
from jaxdp.flags import parse
from jaxdp.recipes import register_from


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the weights and statistics that evaluation uses to a safetensors file, or the network for programs without jaxdp.

    --card also writes, or only writes, a model card: accuracy, data, recipe, versions and a digest of the weights in Markdown.

    Examples:
      jaxdp export --workdir runs/digits --checkpoint best --output digits.safetensors
      jaxdp export --workdir runs/digits --format torchvision --output digits-torch.safetensors
      jaxdp export --workdir runs/digits --format stablehlo --output digits.jaxexport
      jaxdp export --workdir runs/digits --card README.md
    """

    workdir: str
    """Working directory of the run, or its URL"""
    output: str | None = None
    """File to write, ending in .safetensors, .jaxexport (stablehlo) or .onnx"""
    card: str | None = None
    """Model card to write, ending in .md, with the metadata of Hugging Face's model cards"""
    checkpoint: CheckpointName = "result"
    format: Literal["jaxdp", "torchvision", "timm", "stablehlo", "onnx"] = "jaxdp"
    """Weights with names and layouts of jaxdp, or of torchvision and timm, which are the same; or a model for serving:
    stablehlo, read by JAX, or onnx (ResNet; extra onnx)"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the activations, and of the weights in computations, of a stablehlo model"""
    overwrite: Switch = False
    """Overwrite existing files"""
    config: str | None = None
    """Recipe file (.py) that registers the model of the run, if it is not jaxdp's"""
    json: Switch = False
    """Output as one JSON document on stdout"""


def run(arguments: list[str], program: str) -> None:
    options = parse(Export, arguments, program)
    if options.output is None and options.card is None:
        raise ConfigError("--output", reason="required", hint="for example --output digits.safetensors, or --card README.md")
    if options.output is None and options.format != "jaxdp":
        raise ConfigError("--format", options.format, reason="not used without --output", hint="leave it out, or give --output")
    register_from(options.config)
    from jaxdp.inference.export import export
    from jaxdp.inference.model_card import check_card_path, write_card

    workdir, checkpoint, overwrite = options.workdir, options.checkpoint, options.overwrite
    if options.card is not None:
        check_card_path(options.card, overwrite)
    result: dict[str, Any] = {}
    if options.output is not None:
        form = {"format": options.format, "dtype": options.dtype}
        result = export(workdir, options.output, checkpoint, **form, overwrite=overwrite)
    if options.card is not None:
        result["card"] = str(write_card(workdir, options.card, checkpoint, exported=result or None, overwrite=overwrite))
    if options.json:
        print_safe(json.dumps(result, indent=2))
        return
    if "output" in result:
        content = (
            f"{result['tensors']} tensors" if "tensors" in result else f"{result['metadata']['network']} ({options.format})"
        )
        print_safe(f"{result['output']}: {content}, {result['bytes']:,} bytes, from {result['checkpoint']}")
        for warning in result["warnings"]:
            print_safe(warning)
    if "card" in result:
        print_safe(f"card: {result['card']}")
