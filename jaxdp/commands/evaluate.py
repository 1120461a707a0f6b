"""`jaxdp evaluate`."""

import dataclasses
import json
from typing import Annotated

import tyro

from jaxdp.arguments import given
from jaxdp.config import Config
from jaxdp.flags import asks_for_help, parse
from jaxdp.recipes import register_from


def run(arguments, program):
    from jaxdp.training.workdir import run_config

    recipe = Config() if asks_for_help(arguments) else run_config(given(arguments, "--workdir", "runs/digits"))

    @dataclasses.dataclass(frozen=True)
    class Evaluate:
        """Count the right answers of a checkpoint on all held-out images, on this machine's devices.

        Examples:
          jaxdp evaluate --workdir runs/digits
          jaxdp evaluate --workdir runs/digits --checkpoint best --json
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        workdir: str = "runs/digits"
        """of the run"""
        checkpoint: str = "newest"
        """newest, best (by accuracy), or the samples of one, as `jaxdp checkpoints` lists them"""
        config: str | None = None
        """a recipe's file (.py) that registers the run's model or strategy; None: they are jaxdp's own"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document on stdout"""

    chosen = parse(Evaluate, arguments, program)
    register_from(chosen.config)
    from jaxdp.training.restored import evaluate

    told = evaluate(chosen.run, chosen.workdir, chosen.checkpoint)
    if chosen.json:
        print(json.dumps(told, indent=2))
        return
    print(
        f"accuracy {100 * told['eval_accuracy']:.2f} %  (top-5 {100 * told['eval_top5']:.2f} %, "
        f"{told['eval_examples']} held-out images)  loss {told['eval_loss']:.4f}  "
        f"of {told['checkpoint']}, epoch {told['epoch']:.2f}"
    )
