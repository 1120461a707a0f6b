"""`jaxdp export`."""

import dataclasses
import json
from typing import Annotated, Literal

import tyro

from jaxdp.flags import parse
from jaxdp.recipes import register_from


def run(arguments, program):
    @dataclasses.dataclass(frozen=True)
    class Export:
        """Write the weights and statistics that evaluation uses, named by their paths in the tree or as torchvision has them.

        Examples:
          jaxdp export --workdir runs/digits --checkpoint best --output digits.safetensors
          jaxdp export --workdir runs/digits --format torchvision --output digits-torch.safetensors
        """

        output: str
        """the file to write, which ends in .safetensors"""
        workdir: str = "runs/digits"
        """of the run"""
        checkpoint: str = "newest"
        """newest, best (by accuracy), or the samples of one"""
        format: Literal["jaxdp", "torchvision", "timm"] = "jaxdp"
        """whose names and layouts; torchvision's and timm's are the same"""
        overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """write over a file that is there"""
        config: str | None = None
        """a recipe's file (.py) that registers the run's model or strategy; None: they are jaxdp's own"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document on stdout"""

    chosen = parse(Export, arguments, program)
    register_from(chosen.config)
    from jaxdp.training.restored import export

    told = export(chosen.workdir, chosen.output, chosen.checkpoint, chosen.format, chosen.overwrite)
    text = f"{told['tensors']} tensors, {told['bytes']:,} bytes, of {told['checkpoint']} in {told['output']}"
    for remark in told["remarks"]:
        text += f"\n{remark}"
    print(json.dumps(told, indent=2) if chosen.json else text)
