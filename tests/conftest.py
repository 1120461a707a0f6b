"""Eight virtual CPU devices, and a compilation cache so that a second run of the tests is quick."""

import dataclasses
import gc
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background: commands that tests interrupt would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:  # likewise
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; with a handler, the tests still outlast the terminal
    signal.signal(signal.SIGHUP, lambda *_: None)
os.environ["JAX_PLATFORMS"] = "cpu"
# The tests' time is mostly compilation. One LLVM module for a program and XLA's older emitters, which JAX has until 0.10, take
# less than half of it, and LLVM's level 0 half of the rest; level 1 is for processes that tests start, which train for longer.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=1"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("optimization_level=1", "optimization_level=0")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache/xla"))

import jax
import pytest
from helpers.linear import NormalizedLinear
from helpers.shared_programs import SharedPrograms
from hypothesis import HealthCheck, settings

import jaxdp
import jaxdp.data.sources  # noqa: F401 - it implements SOURCES, which tables_as_before copies
from jaxdp import models
from jaxdp.choices import AUTO_AUGMENTS, LOSSES, MODELS, OPTIMIZERS, SOURCES
from jaxdp.cli import main
from jaxdp.config import Config, Data, Logging, Mesh, Model, Optimizer, Phase, Schedule
from jaxdp.distributed import runtime
from jaxdp.distributed.launch import reserved_port
from jaxdp.loggers import default
from jaxdp.metrics import METRICS
from jaxdp.models import activation_memory, resnet
from jaxdp.models.convolution import CONVOLUTIONS
from jaxdp.schedules import SCHEDULES
from jaxdp.strategies import STRATEGIES

gc.freeze()  # nothing imported so far is garbage; JAX's traces are millions of objects; most live until a test ends
gc.set_threshold(200_000, 20, 50)
# No test fails because a machine is slow.
settings.register_profile("any_speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_speed")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
runtime.start(Mesh(cpu_devices=8))
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("optimization_level=0", "optimization_level=1")


PROGRAMS = SharedPrograms()
TABLES = (STRATEGIES, MODELS, OPTIMIZERS, LOSSES, SCHEDULES, AUTO_AUGMENTS, SOURCES, METRICS)


def forget_networks() -> None:
    """For a test that may patch the blocks of a ResNet, which equal configurations do not show."""
    models.init_resnet.clear_cache()
    models.initial_shapes.cache_clear()
    activation_memory._bytes_of_resnet.cache_clear()


@pytest.fixture(autouse=True)
def tables_as_before(request):
    """Undo what a test registers, replaces or removes; help texts and documents have the order of these tables."""
    PROGRAMS.enabled = {"monkeypatch", "own_programs"}.isdisjoint(request.fixturenames)
    if not PROGRAMS.enabled:
        forget_networks()
    tables = [part for table in TABLES for part in (table.entries, table.implementations)]
    entries = [list(table.items()) for table in tables]
    yield
    for table, before in zip(tables, entries, strict=True):
        if list(table.items()) != before:
            table.clear()
            table.update(before)
    if not PROGRAMS.enabled:
        forget_networks()
        PROGRAMS.enabled = True


@pytest.fixture
def own_programs() -> None:
    """Runs of the test compile what they need, though another test has compiled it."""


@pytest.fixture
def plots() -> None:
    """Runs of `tiny` draw training.png."""


@pytest.fixture
def normalized_linear() -> None:
    """Registers the smallest network with statistics as the model "normalized_linear"."""
    jaxdp.register_model("normalized_linear", NormalizedLinear)


@pytest.fixture
def tiny(normalized_linear, request):
    """A run of a second: a linear network with batch normalization, synthetic images, four devices, a change of batch size.

    It draws no training.png, which would take as long as the rest; tests that need one request `plots`.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "plots" not in request.fixturenames:
            patch.setattr(default.TrainingPlot, "on_end", lambda *_: None)
        yield Config(
            name="tiny",
            epochs=3.0,
            data=Data(source="synthetic", image_size=16, train_examples=50, eval_examples=23),
            model=Model(name="normalized_linear", classes=6),
            batch=(Phase(global_batch=8, until_epoch=1.5), Phase(global_batch=16)),
            optimizer=Optimizer(label_smoothing=0.1),
            schedule=Schedule(learning_rate=2.0, warmup_epochs=1.0),
            mesh=Mesh(cpu_devices=4),
            logging=Logging(every_steps=1, tensorboard=False),
        )


@pytest.fixture
def tiny_resnet(tiny, monkeypatch) -> Config:
    """The same run with a "ResNet-18" of two narrow blocks, for tests of what only a ResNet has."""
    monkeypatch.setitem(resnet.BLOCKS, 18, resnet.BLOCKS[resnet.TWO_BLOCKS])
    return dataclasses.replace(tiny, model=Model(depth=18, width=4, stem="small", classes=6))


@pytest.fixture
def direct_convolutions(monkeypatch) -> None:
    """Convolutions have the form that GPUs use, not matrix products."""
    monkeypatch.setitem(CONVOLUTIONS, "cpu", CONVOLUTIONS["gpu"])


@pytest.fixture
def failing(capsys):
    """failing(*arguments, code=2): what a command that must fail prints, without "jaxdp: ": one line on stderr alone."""

    def run(*arguments, code=2) -> str:
        with pytest.raises(SystemExit) as stopped:
            main.main([*map(str, arguments)])
        out, err = capsys.readouterr()
        assert (stopped.value.code, out, err.count("\n")) == (code, "", 1)
        assert err.startswith("jaxdp: ")
        return err[len("jaxdp: ") : -1]

    return run


@pytest.fixture
def free_port() -> int:
    """A port of the loopback that no other program is assigned before the test listens there."""
    return reserved_port()


EIGHT_DEVICES_OF_SEVERAL_PROCESSES = """
import sys
rank, processes, port = map(int, sys.argv[1:4])
import jax
jax.config.update("jax_num_cpu_devices", 8 // processes)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
if processes > 1:
    jax.distributed.initialize(f"localhost:{port}", processes, rank)
"""


@pytest.fixture
def over_processes(free_port):
    """run(code, processes): the lines that `code` prints in each of them, eight devices being spread over them."""

    def run(code: str, processes: int) -> list[list[str]]:
        running = [
            subprocess.Popen(
                [sys.executable, "-c", EIGHT_DEVICES_OF_SEVERAL_PROCESSES + code, *map(str, (rank, processes, free_port))],
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parent,
            )
            for rank in range(processes)
        ]
        printed = [one.communicate(timeout=300)[0].splitlines() for one in running]
        assert [one.returncode for one in running] == [0] * processes
        return printed

    return run
