"""`jaxdp import`: convert weights of torchvision or timm to a file for --finetune.weights."""

import dataclasses
import json
from typing import Annotated

from jaxdp.cli.options import Switch
from jaxdp.config import BlurPool, Model, Preprocessing, Stem
from jaxdp.errors import plural, print_safe
from jaxdp.flags import Arg, parse


@dataclasses.dataclass(frozen=True)
class Import:
    """Convert the weights of a ResNet from torchvision or timm to a file with jaxdp's names, for --finetune.weights.

    Examples:
      jaxdp import resnet50.safetensors --output resnet50-jaxdp.safetensors
      jaxdp import model.safetensors --output ours.safetensors --depth 50 --classes 1000
      jaxdp import v2.safetensors --output ours.safetensors --data.eval-size 224 --data.eval-resize 232
    """

    file: Annotated[str, Arg("FILE", positional=True)]
    """Safetensors file with the names of torchvision or timm"""
    output: str
    """File to write, ending in .safetensors"""
    depth: int | None = None
    """Expected number of layers (None: any)"""
    classes: int | None = None
    """Expected number of classes (None: any)"""
    stem: Stem | None = None
    """Expected first layers (None: any)"""
    blur_pool: BlurPool | None = None
    """BlurPool of the network, for a file that does not state it (None: none)"""
    data: Preprocessing = dataclasses.field(default_factory=Preprocessing)
    overwrite: Switch = False
    """Overwrite an existing output file"""
    json: Switch = False
    """Output as one JSON document on stdout"""


def run(arguments: list[str], program: str) -> None:
    options = parse(Import, arguments, program)
    from jaxdp.models.preprocessing import describe
    from jaxdp.models.weights import import_file

    expected = {name: getattr(options, name) for name in ("depth", "classes", "stem", "blur_pool")}
    result = import_file(options.file, options.output, expected=expected, given=options.data, overwrite=options.overwrite)
    if options.json:
        print_safe(json.dumps(result, indent=2))
        return
    model = result["model"]
    summary = (
        f"{Model(**model).title}, {plural(model['classes'], 'class')}, {result['tensors']} tensors, {result['bytes']:,} bytes"
    )
    print_safe(", ".join([f"{result['output']}: {summary}", *result["notes"]]))
    stated = result["preprocessing"]
    print_safe(
        describe(Preprocessing(**stated)) if stated else "no preprocessing stated; --data.eval-resize and others state it"
    )
