"""`jaxdp export`: write the weights of a checkpoint to a safetensors file, and a model card."""

import dataclasses
import json
from typing import Any, Literal

from jaxdp.cli.options import Switch
from jaxdp.errors import ConfigError
from jaxdp.flags import parse
from jaxdp.recipes import register_from


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the weights and statistics that evaluation uses to a safetensors file, with jaxdp's or torchvision's names.

    --card also writes, or only writes, a model card: accuracy, data, recipe, versions and a digest of the weights in Markdown.

    Examples:
      jaxdp export --workdir runs/digits --checkpoint best --output digits.safetensors
      jaxdp export --workdir runs/digits --format torchvision --output digits-torch.safetensors
      jaxdp export --workdir runs/digits --card README.md
    """

    workdir: str
    """Working directory of the run"""
    output: str | None = None
    """File to write, ending in .safetensors"""
    card: str | None = None
    """Model card to write, ending in .md, with the metadata of Hugging Face's model cards"""
    checkpoint: str = "result"
    """Checkpoint to export: result (the newest, or with early stopping the best), newest, best (by `stop.metric`), or its
    number of samples"""
    format: Literal["jaxdp", "torchvision", "timm"] = "jaxdp"
    """Names and layouts of the tensors; those of torchvision and timm are the same"""
    overwrite: Switch = False
    """Overwrite existing files"""
    config: str | None = None
    """Recipe file (.py) that registers the model or strategy of the run, if they are not jaxdp's"""
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
        result = export(workdir, options.output, checkpoint, format=options.format, overwrite=overwrite)
    if options.card is not None:
        result["card"] = str(write_card(workdir, options.card, checkpoint, exported=result or None, overwrite=overwrite))
    if options.json:
        print(json.dumps(result, indent=2))
        return
    if "output" in result:
        print(f"{result['output']}: {result['tensors']} tensors, {result['bytes']:,} bytes, from {result['checkpoint']}")
        for warning in result["warnings"]:
            print(warning)
    if "card" in result:
        print(f"card: {result['card']}")
