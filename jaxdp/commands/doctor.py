"""`jaxdp doctor`."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import tyro

from jaxdp.arguments import load
from jaxdp.config import Config, ConfigError
from jaxdp.errors import EXIT_FAILURE
from jaxdp.validation import validate


def run(arguments, program):
    recipe = load(arguments, default="digits")

    @dataclasses.dataclass(frozen=True)
    class Doctor:
        """Look whether this machine can do a run: devices, versions, CUDA, NCCL, memory, disks, data, network, limits. Exits
        with 1 where something is wrong.

        Examples:
          jaxdp doctor
          jaxdp doctor --config imagenet_goyal_8k --images-per-second 2000
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        config: str = "digits"
        """the recipe whose needs are judged: a name in configs/, a .py file with config(), or a saved config.json"""
        workdir: str | None = None
        """where the run would write; default: runs/NAME"""
        images_per_second: float | None = None
        """images/s that each device trains, as `jaxdp bench step` measures: how many cores are to decode for it"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document on stdout"""

    chosen = tyro.cli(Doctor, args=arguments, prog=program)
    config = validate(chosen.run)
    rate = chosen.images_per_second
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--images-per-second: {rate} is not allowed; give a number above 0")
    from jaxdp.doctor import checks
    from jaxdp.doctor.finding import WRONG, still_running

    workdir = Path("runs") / config.name if chosen.workdir is None else Path(chosen.workdir)
    findings = checks.look(config, workdir, rate)
    if chosen.json:
        print(json.dumps(checks.as_dict(findings, config), indent=2))
    else:
        from jaxdp.training.console import Screen

        screen = Screen()
        screen.table(checks.table(findings))
        screen.say(checks.summary(findings, config))
    code = EXIT_FAILURE if any(one.state == WRONG for one in findings) else 0
    if still_running():
        sys.stdout.flush()
        os._exit(code)
    if code:
        sys.exit(code)
