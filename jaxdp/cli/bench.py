"""`jaxdp bench`: measure this machine."""

import dataclasses
import io
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from jaxdp.cli.options import ConfigFields, Switch
from jaxdp.config import Config
from jaxdp.errors import EXIT_FAILURE, ConfigError, one_of, print_safe
from jaxdp.files import check_output, write_output
from jaxdp.flag_help import rows
from jaxdp.flags import flag_value, parse
from jaxdp.recipes import load_recipe
from jaxdp.validation import validate
from jaxdp.xla.jax_options import jaxdp_jax_config

LARGEST_MESSAGE = 2**34  # bytes; larger than any model's gradients, and every device holds a copy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What every benchmark takes."""

    run: ConfigFields = dataclasses.field(default_factory=Config)
    config: str = "digits"
    """Recipe that is measured, with the batch of its first phase"""
    output: str | None = None
    """Directory for the record as JSON and its plot, if it has one, as PNG (None: bench/BENCHMARK)"""
    json: Switch = False
    """Output as one JSON document on stdout"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed(Options):
    """What every benchmark takes that repeats its measurements."""

    repeats: int = 7
    """Number of timed calls or rounds of each kind, alternating"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allreduce(Timed):
    """Time every all-reduce strategy on the mesh of this machine, verify every sum, fit latency and bandwidth, and recommend a
    strategy. Exits with 1 if a strategy returns wrong sums.

    Examples:
      jaxdp bench allreduce
      jaxdp launch --processes 2 -- jaxdp bench allreduce --mesh.cpu-devices 2
      jaxdp bench allreduce --config imagenet_sony_exp2 --mesh.cpu-devices 8 --sizes 65536 1048576 --repeats 5
    """

    sizes: tuple[int, ...] = (16_384, 262_144, 4_194_304, 67_108_864)
    """Sizes of the messages, in bytes"""
    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16")
    """Dtypes of the messages while they are communicated and summed"""
    repeats: int = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input(Timed):
    """Time the input pipeline in images/s: reading, decoding, cropping, batching, transfer to the devices.

    Examples:
      jaxdp bench input
      jaxdp bench input --data.source folder --data.directory ~/pictures --batch-size 128
    """

    config: str = "imagenet_goyal_8k"
    batch_size: int = 64
    """Number of images per batch"""
    repeats: int = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling(Timed):
    """Time the training step on increasing numbers of devices: speed-up, efficiency, exposed communication, waiting.

    Examples:
      jaxdp bench scaling --config cifar10_resnet50 --devices 1 2 4 8 --mesh.cpu-devices 8 --batch.0.global-batch 32
      jaxdp bench scaling --config imagenet_mlperf_3264 --devices 1 2 4 8
    """

    devices: tuple[int, ...] = ()
    """Increasing numbers of devices (None: powers of two up to all)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCommand(Timed):
    """Time the training step on synthetic images on the devices: images/s, fraction of the devices' peak, memory, and
    compilation time.

    Examples:
      jaxdp bench step
      jaxdp bench step --config imagenet_goyal_256 --batch-size 256 --batch.0.per-worker-batch 256 --model.dtype bfloat16
      jaxdp bench step --model.stem small --batch-size 64 --mesh.cpu-devices 1 --kernels
    """

    batch_size: int | None = None
    """Number of images per step on all devices (None: the first phase's batch, or its per-worker batch on each device)"""
    kernels: bool = False
    """Table of the step's time by kind of kernel, from a profile of some more steps"""
    seconds: float = 2.0
    """Approximate duration of a round, in seconds"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRate(Options):
    """Find a learning rate for the recipe's data, batch, model and optimizer with a range test: train with a rate that grows
    from step to step, and suggest a peak rate from the losses. Nothing is saved but the record and the plot.

    Examples:
      jaxdp bench lr
      jaxdp bench lr --config finetune --optimizer.name lars --batch.0.global-batch 128 --steps 200
    """

    steps: int = 100
    """Number of steps"""
    lowest: float | None = None
    """Learning rate of the first step (None: a thousandth of the recipe's peak)"""
    highest: float | None = None
    """Learning rate of the last step (None: a hundred times the recipe's peak)"""


def run(arguments: list[str], program: str) -> None:
    if arguments and arguments[0] in ("-h", "--help"):
        print_safe(
            f"usage: {program} NAME [options]\n\nMeasure parts of a run on this machine.\n\n"
            f"benchmarks:\n{rows({name: text for name, (text, *_) in BENCHES.items()})}\n\n"
            f"`{program} NAME --help` lists its options.\n\nExamples:\n"
            f"  {program} allreduce --mesh.cpu-devices 8\n  {program} step --config imagenet_goyal_256 --batch-size 256"
        )
        return
    if not arguments:
        raise ConfigError("bench", reason="missing benchmark", hint=f"choose from {', '.join(BENCHES)}")
    if arguments[0] not in BENCHES:
        raise one_of("bench", arguments[0], BENCHES)
    name, flags = arguments[0], arguments[1:]
    _, kind, bench = BENCHES[name]
    recipe = load_recipe(flags, default=kind.config)
    options = parse(kind, flags, f"{program} {name}", default=kind(run=recipe.config))
    check_output(_folder(options, name) / f"{name}.json", overwrite=True)  # before minutes of measuring
    with jaxdp_jax_config():
        bench(options, flags)


def _bench_allreduce(options: Allreduce, flags: list[str]) -> None:
    if not options.sizes or min(options.sizes) < 4:
        raise ConfigError("--sizes", options.sizes, reason="must be at least 4 bytes each")
    if max(options.sizes) > LARGEST_MESSAGE:
        raise ConfigError("--sizes", max(options.sizes), reason=f"must be at most {LARGEST_MESSAGE} (16 GiB)")
    from jaxdp.distributed import runtime

    group = runtime.join(guard=options.run.guard, directory=_folder(options, "allreduce"))
    with runtime.fail_together(group):
        record = _allreduce_record(options)
        if group.is_rank0:
            from jaxdp.bench import allreduce

            _bench_result(options, "allreduce", record, bench=allreduce)
    runtime.exit_together(group, EXIT_FAILURE if record["wrong_sums"] else 0)


def _allreduce_record(options: Allreduce) -> dict[str, Any]:
    config, devices = _start(options)

    from jaxdp import models
    from jaxdp.bench import allreduce
    from jaxdp.parallel.mesh import make_mesh

    mesh = make_mesh(config.mesh.vertical, config.mesh.horizontal, devices)
    if mesh.size < 2:
        raise ConfigError("mesh", reason="an all-reduce needs at least two devices", hint="on a CPU use --mesh.cpu-devices 4")
    size = config.data.image_size
    model = models.create(config.model)
    params, _ = models.initial_shapes(model, (size, size, 3))
    gradient = model.trainable(params, config.finetune.frozen_stages)
    return allreduce.run(config, mesh, gradient, sizes=options.sizes, dtypes=options.dtypes, repeats=options.repeats)


def _bench_input(options: Input, flags: list[str]) -> None:
    if options.batch_size < 1:
        raise ConfigError("--batch-size", options.batch_size, reason="must be at least 1")
    config, devices = _start(options)
    from jaxdp.bench import input as bench
    from jaxdp.data.sources import open_split
    from jaxdp.parallel.mesh import make_mesh

    has_source = any(flag_value(flags, flag) is not None for flag in ("--data.source", "--data.directory"))
    source = open_split(config, config.data.train_split) if has_source else None
    count = max(n for n in range(1, len(devices) + 1) if options.batch_size % n == 0)
    record = bench.run(config, make_mesh(1, count), batch_size=options.batch_size, repeats=options.repeats, source=source)
    _bench_result(options, "input", record, bench=bench)


def _bench_lr(options: LearningRate, flags: list[str]) -> None:
    config = validate(options.run)
    from jaxdp.bench import lr as bench
    from jaxdp.loggers.console import Screen

    record = bench.run(
        config, lowest=options.lowest, highest=options.highest, steps=options.steps, progress=Screen(sys.stderr).info
    )
    _bench_result(options, "lr", record, bench=bench)


def _bench_scaling(options: Scaling, flags: list[str]) -> None:
    config, devices = _start(options)
    from jaxdp.bench import scaling
    from jaxdp.loggers.console import Screen

    counts = options.devices or tuple(2**power for power in range(len(devices).bit_length()))
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is kept
    try:
        record = scaling.run(config, counts, repeats=options.repeats, progress=Screen(sys.stderr).info)
    finally:
        signal.signal(signal.SIGTERM, handler)
    _bench_result(options, "scaling", record, bench=scaling)
    if record["stopped"]:
        raise KeyboardInterrupt


def _bench_step(options: StepCommand, flags: list[str]) -> None:
    if not options.seconds > 0:
        raise ConfigError("--seconds", options.seconds, reason="must be greater than 0")
    from jaxdp.bench import step as bench
    from jaxdp.parallel.mesh import make_mesh

    config, devices = _start(options)
    mesh = make_mesh(config.mesh.vertical, config.mesh.horizontal, devices)
    batch = bench.default_batch(config, mesh.size) if options.batch_size is None else options.batch_size
    bench.check(config, batch, devices=mesh.size, profile=options.kernels)
    record = bench.run(
        config,
        mesh,
        batch=batch,
        repeats=options.repeats,
        seconds=options.seconds,
        profile=options.kernels,
        keep=lambda record: _write(options, "step", record),
    )
    _bench_result(options, "step", record, bench=bench)


def _validated(options: Timed) -> Config:
    """The config of a benchmark, with the number of classes if it needs a model.

    Raises ConfigError for it or for the common options.
    """
    if options.repeats < 1:
        raise ConfigError("--repeats", options.repeats, reason="must be at least 1")
    config = validate(options.run)
    if config.model.classes is None and not isinstance(options, Input):
        from jaxdp.data.sources import inspect

        config, _ = inspect(config)
    return config


def _start(options: Timed) -> tuple[Config, list]:
    from jaxdp.distributed import runtime

    config = _validated(options)
    return config, runtime.start(config.mesh, cache=True)


def _folder(options: Options, name: str) -> Path:
    return Path("bench", name) if options.output is None else Path(options.output)


def _write(options: Options, name: str, record: dict[str, Any]) -> Path:
    """Write the JSON file of a benchmark; its folder."""
    folder = _folder(options, name)
    write_output(folder / f"{name}.json", f"{json.dumps(record, indent=1)}\n".encode())
    return folder


def _bench_result(options: Options, name: str, record: dict[str, Any], *, bench: ModuleType) -> None:
    """Print the tables of a benchmark, and write its JSON file and its plot, if it has one, even if printing fails."""
    from jaxdp.loggers.console import Screen

    screen = Screen()
    try:
        if options.json:
            print_safe(json.dumps(record, indent=1))
        for part in [] if options.json else bench.render(record):
            (screen.info if isinstance(part, str) else screen.table)(part)
            screen.info("")
    finally:
        folder, written = _write(options, name, record), [f"{name}.json"]
        if hasattr(bench, "draw"):
            picture = io.BytesIO()
            bench.draw(record, picture)
            write_output(folder / f"{name}.png", picture.getvalue())
            written.append(f"{name}.png")
    if not options.json:
        screen.info(f"written to {folder}: {', '.join(written)}")
        screen.info("")


BENCHES: dict[str, tuple[str, type[Options], Callable[[Any, list[str]], None]]] = {
    "allreduce": ("Time every all-reduce strategy", Allreduce, _bench_allreduce),
    "input": ("Time the input pipeline: read, decode, crop, transfer", Input, _bench_input),
    "lr": ("Find a learning rate with a range test", LearningRate, _bench_lr),
    "scaling": ("Time the training step on increasing numbers of devices", Scaling, _bench_scaling),
    "step": ("Time the training step", StepCommand, _bench_step),
}
