"""The command line of `jaxdp bench`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxdp.arguments import load
from jaxdp.config import IN_MEMORY, Config, ConfigError
from jaxdp.flags import one_of, parse, rows
from jaxdp.validation import validate

LARGEST_MESSAGE = 2**34  # bytes, of which every device holds a copy: more than any model's gradients
BENCHES = {
    "allreduce": "every all-reduce strategy on the mesh at hand",
    "input": "the way of images to the devices: read, decode, crop, transfer",
    "scaling": "the training step on growing numbers of devices",
    "step": "the training step by itself, and a command's start",
}


def run(arguments, program):
    """`jaxdp bench NAME ...`."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(
            f"usage: {program} NAME [options]\n\nTime parts of a run on this machine.\n\nbenches:\n{rows(BENCHES)}\n\n"
            f"`{program} NAME --help` lists every option.\n\nExamples:\n"
            f"  {program} allreduce --mesh.cpu-devices 8\n  {program} step --config imagenet_goyal_256 --batch-size 256"
        )
        return
    if not arguments or arguments[0] not in BENCHES:
        raise one_of("bench", arguments[0] if arguments else "", BENCHES)
    name, rest = arguments[0], arguments[1:]
    benches = {"allreduce": _bench_allreduce, "input": _bench_input, "scaling": _bench_scaling, "step": _bench_step}
    benches[name](rest, f"{program} {name}")


def _bench_allreduce(arguments, program):
    recipe = load(arguments, default="digits")

    @dataclasses.dataclass(frozen=True)
    class BenchAllreduce:
        """Time every all-reduce strategy on the mesh at hand, fit latency and bandwidth, and say which to take.

        Examples:
          jaxdp bench allreduce
          jaxdp bench allreduce --config imagenet_sony_exp2 --mesh.cpu-devices 8 --sizes 65536 1048576 --repeats 5
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        config: str = "digits"
        """the recipe whose mesh, wire dtype and gradient are measured"""
        sizes: tuple[int, ...] = (16_384, 262_144, 4_194_304, 67_108_864)
        """bytes of a message"""
        dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16")
        """of the messages"""
        repeats: int = 9
        """timed calls of each, taking turns"""
        output: str = "bench/allreduce"
        """directory for allreduce.json and allreduce.png"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print the record as one JSON document on stdout"""

    chosen = parse(BenchAllreduce, arguments, program)
    if not chosen.sizes or min(chosen.sizes) < 4:
        raise ConfigError(f"--sizes: {chosen.sizes} is not allowed; give numbers of bytes, 4 or more")
    if max(chosen.sizes) > LARGEST_MESSAGE:
        raise ConfigError(f"--sizes: {max(chosen.sizes)} is not allowed; give at most {LARGEST_MESSAGE}, the bytes of 16 GiB")
    config, devices = _bench_devices(chosen)
    import jax

    from jaxdp import models
    from jaxdp.bench import allreduce
    from jaxdp.parallel.mesh import choose_shape, make_mesh

    mesh = make_mesh(*choose_shape(config.mesh, len(devices), jax.process_count()))
    if mesh.size < 2:
        raise ConfigError("mesh: one device has nobody to exchange with; on a CPU give --mesh.cpu-devices 4")
    size = config.data.image_size
    gradient, _ = jax.eval_shape(lambda: models.create(config.model).init(jax.random.key(0), (size, size, 3)))
    gradient = models.create(config.model).trained(gradient, config.finetune.frozen_stages)
    record = allreduce.run(config, mesh, gradient, chosen.sizes, chosen.dtypes, chosen.repeats)
    _bench_result(chosen, "allreduce", record, allreduce)


def _bench_input(arguments, program):
    recipe = load(arguments, default="imagenet_goyal_8k")

    @dataclasses.dataclass(frozen=True)
    class BenchInput:
        """Time the way of images to the devices: read, decode, crop, batch, transfer, each in images a second.

        Examples:
          jaxdp bench input
          jaxdp bench input --data.source folder --data.directory ~/pictures --batch-size 128
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        config: str = "imagenet_goyal_8k"
        """the recipe whose crop is taken"""
        batch_size: int = 64
        """images of a batch"""
        repeats: int = 5
        """timed calls of each stage"""
        output: str = "bench/input"
        """directory for input.json and input.png"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print the record as one JSON document on stdout"""

    chosen = parse(BenchInput, arguments, program)
    if chosen.batch_size < 1:
        raise ConfigError(f"--batch-size: {chosen.batch_size} is not allowed; give 1 or more")
    config, devices = _bench_devices(chosen)
    from jaxdp.bench import input as bench
    from jaxdp.data.sources import open_split
    from jaxdp.parallel.mesh import make_mesh

    asked = any(word.split("=")[0] in ("--data.source", "--data.directory") for word in arguments)
    if asked and config.data.source in IN_MEMORY:
        raise ConfigError(f"data.source: {config.data.source!r} is not allowed; its images are made, not read")
    source = open_split(config.data, config.data.train_split) if asked else None
    count = max(n for n in range(1, len(devices) + 1) if chosen.batch_size % n == 0)
    _bench_result(chosen, "input", bench.run(config, make_mesh(1, count), chosen.batch_size, chosen.repeats, source), bench)


def _bench_scaling(arguments, program):
    recipe = load(arguments, default="digits")

    @dataclasses.dataclass(frozen=True)
    class BenchScaling:
        """Time the training step on growing numbers of devices: speed-up, efficiency, exposed communication, waiting.

        Examples:
          jaxdp bench scaling --config cifar10_resnet50 --devices 1 2 4 8 --mesh.cpu-devices 8 --batch.0.global-batch 32
          jaxdp bench scaling --config imagenet_mlperf_3264 --devices 1 2 4 8
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        config: str = "digits"
        """the recipe whose step is timed, with the batch of its first phase"""
        devices: tuple[int, ...] = ()
        """growing numbers of devices; default: powers of two up to all"""
        repeats: int = 7
        """timed steps of each kind, taking turns"""
        output: str = "bench/scaling"
        """directory for scaling.json and scaling.png"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print the record as one JSON document on stdout"""

    chosen = parse(BenchScaling, arguments, program)
    config, devices = _bench_devices(chosen)
    from jaxdp.bench import scaling
    from jaxdp.training.console import Screen

    counts = chosen.devices or tuple(2**power for power in range(len(devices).bit_length()))
    progress = Screen(sys.stderr).say
    record = scaling.run(config, counts, chosen.repeats, progress)
    _bench_result(chosen, "scaling", record, scaling)


def _bench_step(arguments, program):
    recipe = load(arguments, default="digits")

    @dataclasses.dataclass(frozen=True)
    class BenchStep:
        """Time the training step by itself, on images made on the devices: images/s, share of what the devices can do at most,
        memory, compilation, and the time to a first step with a cold and a warm cache.

        Examples:
          jaxdp bench step
          jaxdp bench step --config imagenet_goyal_256 --batch-size 256 --batch.0.per-worker-batch 256 --model.dtype bfloat16
          jaxdp bench step --model.stem small --batch-size 64 --mesh.cpu-devices 1 --no-starts --kernels
        """

        run: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=lambda: recipe)
        config: str = "digits"
        """the recipe whose step is timed"""
        batch_size: int | None = None
        """images of a step, on all devices; default: of the recipe's first phase, or its per-worker batch on each device"""
        starts: bool = True
        """time the start of a command as well, twice"""
        kernels: bool = False
        """profile a few steps more, for a table of the step's time by kind of kernel"""
        repeats: int = 7
        """timed rounds"""
        seconds: float = 2.0
        """of a round, about"""
        output: str = "bench/step"
        """directory for step.json and step.png"""
        json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """print the record as one JSON document on stdout"""

    chosen = parse(BenchStep, arguments, program)
    if not chosen.seconds > 0:
        raise ConfigError(f"--seconds: {chosen.seconds} is not allowed; give more than 0")
    starts, config = None, _bench_config(chosen)
    from jaxdp.bench import step as bench
    from jaxdp.parallel.mesh import choose_shape, make_mesh
    from jaxdp.training.console import Screen

    def batch_on(devices: int) -> int:
        batch = bench.batch_for(config, devices) if chosen.batch_size is None else chosen.batch_size
        bench.check(config, batch, devices, chosen.kernels)
        return batch

    if chosen.starts:
        batch = batch_on(bench.devices_there(config))
        Screen(sys.stderr).say("two commands of one step, to see how long a start takes ...")
        starts = bench.first_steps(config, batch)
    config, devices = _bench_devices(chosen)
    mesh = make_mesh(*choose_shape(config.mesh, len(devices)))
    batch = batch_on(mesh.size)
    record = bench.run(config, mesh, batch, chosen.repeats, chosen.seconds, starts, chosen.kernels)
    _bench_result(chosen, "step", record, bench)


def _bench_devices(chosen):
    """(the config, the devices of this machine) of a bench."""
    from jaxdp.parallel import distributed

    config = _bench_config(chosen)
    return config, distributed.start(config.mesh, compile=config.compile)


def _bench_config(chosen) -> Config:
    """The validated config of a bench, its common options checked."""
    if chosen.repeats < 1:
        raise ConfigError(f"--repeats: {chosen.repeats} is not allowed; give 1 or more")
    return validate(chosen.run)


def _bench_result(chosen, name, record, bench):
    """Write a bench's JSON and picture, and show what it has to tell."""
    from jaxdp.training.console import Screen

    folder = Path(chosen.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    bench.draw(record, folder / f"{name}.png")
    if chosen.json:
        print(json.dumps(record, indent=1))
        return
    screen = Screen()
    for one in [*bench.shown(record), f"written to {folder}: {name}.json, {name}.png"]:
        (screen.say if isinstance(one, str) else screen.table)(one)
        screen.say("")
