"""`jaxdp evaluate`: evaluate a checkpoint on the held-out images."""

import dataclasses
import json

from jaxdp import metrics
from jaxdp.cli.options import CheckpointName, ConfigFields, Switch, weights_flag
from jaxdp.config import Config
from jaxdp.errors import print_safe
from jaxdp.flag_help import asks_for_help
from jaxdp.flags import flag_value, parse
from jaxdp.recipes import register_from, reset_for_network


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Compute the metrics of a checkpoint on all held-out images, on the devices of this machine.

    Examples:
      jaxdp evaluate --workdir runs/digits
      jaxdp evaluate --workdir runs/digits --checkpoint best --json
      jaxdp evaluate --weights resnet50.safetensors --data.source folder --data.directory pictures
      jaxdp evaluate --weights resnet50.safetensors --data.source imagenet_v2/matched-frequency
    """

    workdir: str
    """Working directory of the run"""
    weights: str | None = None
    """Safetensors file of jaxdp, torchvision or timm to evaluate in place of a run, with --data.source"""
    run: ConfigFields = dataclasses.field(default_factory=Config)
    checkpoint: CheckpointName = "result"
    flip: Switch = False
    """Evaluate the mean of the logits of each image and its mirror image"""
    config: str | None = None
    """Recipe file (.py) that registers the model, data and loss of the run, if they are not jaxdp's"""
    json: Switch = False
    """Output as one JSON document on stdout"""


def run(arguments: list[str], program: str) -> None:
    from jaxdp.setup.run_dir import run_config

    weights, workdir = weights_flag(arguments), None if asks_for_help(arguments) else flag_value(arguments, "--workdir")
    default = None if workdir is None else Evaluate(workdir, run=reset_for_network(run_config(workdir), arguments))
    if weights is not None:
        from jaxdp.inference.load_run import weights_config

        default = Evaluate("", run=reset_for_network(weights_config(weights), arguments))
    options = parse(Evaluate, arguments, program, default=default)
    register_from(options.config)
    from jaxdp.inference.evaluate import evaluate, evaluate_weights

    if options.weights is None:
        result = evaluate(options.run, options.workdir, options.checkpoint, flip=options.flip)
        source = f"checkpoint {result['checkpoint']}, epoch {result['epoch']:.2f}"
    else:
        result, source = evaluate_weights(options.weights, options.run, flip=options.flip)
    if options.flip:
        result, source = result | {"flip": True}, f"{source}, with mirror images"
    if options.json:
        print_safe(json.dumps(result, indent=2))
        return
    first, *others, loss = metrics.words(result)
    print_safe(f"{first}  ({', '.join([*others, f'{result[metrics.COUNT]} held-out images'])})  {loss}  {source}")
