"""`jaxdp export`: write the weights of a checkpoint to a safetensors file."""

import dataclasses
import json
from typing import Literal

from jaxdp.cli.options import Switch
from jaxdp.flags import parse
from jaxdp.recipes import register_from


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the weights and statistics that evaluation uses to a safetensors file, with jaxdp's or torchvision's names.

    Examples:
      jaxdp export --workdir runs/digits --checkpoint best --output digits.safetensors
      jaxdp export --workdir runs/digits --format torchvision --output digits-torch.safetensors
    """

    output: str
    """File to write, ending in .safetensors"""
    workdir: str
    """Working directory of the run"""
    checkpoint: str = "result"
    """Checkpoint to export: result (the newest, or with early stopping the best), newest, best (by `stop.metric`), or its
    number of samples"""
    format: Literal["jaxdp", "torchvision", "timm"] = "jaxdp"
    """Names and layouts of the tensors; those of torchvision and timm are the same"""
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

    result = export(options.workdir, options.output, options.checkpoint, format=options.format, overwrite=options.overwrite)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['output']}: {result['tensors']} tensors, {result['bytes']:,} bytes, from {result['checkpoint']}")
    for warning in result["warnings"]:
        print(warning)
