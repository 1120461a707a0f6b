"""`jaxdp import`."""

import dataclasses
import json
from typing import Annotated, Literal

import tyro

from jaxdp.flags import parse


def run(arguments, program):
    @dataclasses.dataclass(frozen=True)
    class Import:
        """Turn a ResNet's weights, as torchvision or timm name them, into a file of jaxdp's own, for --finetune.weights.

        Examples:
          jaxdp import resnet50.safetensors --output resnet50-jaxdp.safetensors
          jaxdp import model.safetensors --output ours.safetensors --depth 50 --classes 1000
        """

        file: tyro.conf.Positional[str]
        """a safetensors file with torchvision's or timm's names"""
        output: str
        """the file to write, which ends in .safetensors"""
        depth: int | None = None
        """that the network is to have; None: whatever it has"""
        classes: int | None = None
        """that the network is to have; None: as many as it has"""
        stem: Literal["imagenet", "small"] | None = None
        """that the network is to have; None: whichever it has"""
        overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """write over a file that is there"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document on stdout"""

    chosen = parse(Import, arguments, program)
    from jaxdp.models.weights import import_file

    expected = {name: getattr(chosen, name) for name in ("depth", "classes", "stem")}
    told = import_file(chosen.file, chosen.output, expected, chosen.overwrite)
    model = told["model"]
    text = f"ResNet-{model['depth']}, {model['classes']} classes: {told['tensors']} tensors, {told['bytes']:,} bytes"
    text = ", ".join([f"{text} in {told['output']}", *told["remarks"]])
    print(json.dumps(told, indent=2) if chosen.json else text)
