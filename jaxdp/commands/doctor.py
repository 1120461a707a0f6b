"""`jaxdp doctor`."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import tyro

from jaxdp.arguments import load
from jaxdp.config import Config, ConfigError
from jaxdp.errors import EXIT_FAILURE
from jaxdp.files import check_output, write_whole
from jaxdp.flags import parse
from jaxdp.validation import validate


def run(arguments, program):
    recipe = load(arguments, default="digits")

    @dataclasses.dataclass(frozen=True)
    class Doctor:
        """Look whether this machine can do a run: devices, versions, CUDA, NCCL, memory, disks, data, network, limits. Exits
        with 1 where something is wrong. With --verify: prove that its devices train as they should.

        Examples:
          jaxdp doctor
          jaxdp doctor --config imagenet_goyal_8k --images-per-second 2000
          jaxdp doctor --verify --output proofs.json
          jaxdp doctor --verify --mesh.cpu-devices 8
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        config: str = "digits"
        """the recipe whose needs are judged: a name in configs/, a .py file with config(), or a saved config.json"""
        workdir: str | None = None
        """where the run would write; default: runs/NAME"""
        images_per_second: float | None = None
        """images/s that each device trains, as `jaxdp bench step` measures: how many cores are to decode for it"""
        cluster: str = "auto"
        """whose variables tell of the other processes of the run: auto, none, jax, kubeflow, torchrun, openmpi or slurm"""
        coordinator: str | None = None
        """HOST:PORT at which rank 0 is to listen, with --processes and --rank: as `jaxdp train` takes them"""
        processes: int | None = None
        """of the run, on all hosts"""
        rank: int | None = None
        """of this process, from 0"""
        verify: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """instead: gradients of every strategy on every mesh against one device's, the same bits twice, a run that is stopped
        and goes on, and the step's time on growing numbers of devices; a CPU is split into --mesh.cpu-devices, or 4"""
        output: str | None = None
        """with --verify: a file for the proofs as JSON, with machine, versions and commit"""
        overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """write over a file that is there"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print one JSON document on stdout"""

    chosen = parse(Doctor, arguments, program)
    config = validate(chosen.run)
    rate = chosen.images_per_second
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--images-per-second: {rate} is not allowed; give a number above 0")
    if chosen.verify:
        return _verify(chosen, config)
    if chosen.output is not None:
        raise ConfigError(f"--output: {chosen.output!r} is not allowed without --verify; give --json and a redirection")
    with contextlib.redirect_stdout(sys.stderr):  # where a package that is not whole says so
        from jaxdp.doctor import checks
    from jaxdp.doctor.finding import WRONG, as_dict, still_running, summary
    from jaxdp.training.console import Screen

    workdir = Path("runs") / config.name if chosen.workdir is None else Path(chosen.workdir)
    given = {"asked": chosen.cluster} | {name: getattr(chosen, name) for name in ("coordinator", "processes", "rank")}
    findings = checks.look(config, workdir, rate, given=given)
    if chosen.json:
        print(json.dumps(as_dict(findings, config.name), indent=2))
    else:
        screen = Screen()
        screen.say(f"this machine, for the recipe {config.name}")
        screen.table(checks.table(findings))
        screen.say(summary(findings))
    code = EXIT_FAILURE if any(one.state == WRONG for one in findings) else 0
    if still_running():
        sys.stdout.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def _verify(chosen, config):
    """Exits with 1 where a proof has failed."""
    for name in ("workdir", "images_per_second", "coordinator", "processes", "rank"):
        if getattr(chosen, name) is not None:
            flag, given = name.replace("_", "-"), getattr(chosen, name)
            raise ConfigError(f"--{flag}: {given!r} is not allowed with --verify, which does not use it; leave it out")
    output = None if chosen.output is None else check_output(chosen.output, chosen.overwrite)
    from jaxdp.doctor import verify
    from jaxdp.training.console import Screen

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: one line, no temporary files left behind
    try:
        record = verify.run(config, Screen(sys.stderr).say)
    finally:
        signal.signal(signal.SIGTERM, before)
    if output:
        write_whole(output, (verify.to_json(record) + "\n").encode())
    if chosen.json:
        print(verify.to_json(record))
    else:
        screen = Screen()
        for one in verify.shown(record):
            (screen.say if isinstance(one, str) else screen.table)(one)
        if output:
            screen.say(f"written to {output}")
    if record["failed"]:
        sys.exit(EXIT_FAILURE)
