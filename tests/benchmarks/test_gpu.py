"""The calls of benchmarks/gpu.py, without a GPU: on a CPU, and compiled for a GPU."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxdp.analysis import aot
from jaxdp.cli import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    return gpu


@pytest.fixture
def commands(gpu, monkeypatch, tmp_path):
    """A function that returns the commands of a call, in place of running them."""

    def commands_of(call):
        found = []

        def started(words, out=None):
            found.append(words)
            if "--output" in words:
                output = Path(words[words.index("--output") + 1])
                if output.suffix != ".json":
                    output.mkdir()
                    (output / "step.json").write_text("{}")
            elif "--workdir" in words:
                (Path(words[words.index("--workdir") + 1]) / "result.json").write_text("{}")

        monkeypatch.setattr(gpu, "started", started)
        monkeypatch.setattr(sys, "argv", ["gpu.py", call, "--results", str(tmp_path)])
        gpu.main()
        return found

    return commands_of


@pytest.mark.parametrize("call", ["best", "changes", "folded", "flags", "modes", "batches"])
def test_contenders_of_a_call_exist(commands, call):
    import step_vs_pytorch

    [words] = commands(call)
    names = words[words.index("--only") + 1 : words.index("--cases")]
    known = {*step_vs_pytorch.GPU_NAMES, *(f"jaxdp:{name}" for name in step_vs_pytorch.VARIANTS)}
    assert names
    assert {*names} <= known


def test_flags_of_a_call_exist(commands, capsys):
    with pytest.raises(SystemExit):
        main.main(["bench", "step", "--help", "all"])
    offered = capsys.readouterr().out
    for words in commands("position"):
        flags = [word for word in words if re.match(r"--[a-z]", word)]
        assert [flag for flag in flags if flag.replace("batch.0", "batch.N") not in offered and flag not in offered] == []


@pytest.mark.slow
def test_xla_has_the_flags_of_the_contenders(gpu):
    """XLA ends a process that sets a flag which it does not have; XLA for CPUs has those for GPUs too."""
    import step_vs_pytorch

    flags = " ".join(flags for flags, _ in step_vs_pytorch.VARIANTS.values())
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}, check=True)


@pytest.fixture
def tables(gpu, monkeypatch, tmp_path):
    import common
    import tables

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tables


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["run verify", "best", "folded", "position", "changes"], ids=lambda calls: calls.split()[0])
def test_calls_write_records_for_the_tables(gpu, tables, monkeypatch, tmp_path, calls):
    """On a CPU, with two small images and a small network, but for ResNet-50 beside PyTorch, which may not be installed.

    Left out: flags and batches (other contenders and cases, in the same way), modes (of PyTorch alone), and what needs CUDA:
    its graphs and published limits. The run is a short one.
    """
    import step_vs_pytorch

    calls = calls.split()
    monkeypatch.setattr(gpu, "START_SECONDS", dict.fromkeys(gpu.COMPARED, 3000))
    monkeypatch.setattr(gpu, "SIDE_BY_SIDE", [*gpu.SIDE_BY_SIDE[:1], "--seconds", "0.1"])
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("optimization_level=1", "optimization_level=0"))
    started, small = gpu.started, ["--model.depth", "18", "--model.width", "16"]
    more = {"-m": small, "train.py": [*small, "--epochs", "0.5"]}
    monkeypatch.setattr(gpu, "started", lambda words, *out: started([*words, *more.get(words[0], [])], *out))
    for call in calls:
        monkeypatch.setattr(sys, "argv", ["gpu.py", call, "--results", str(tmp_path), "--cases", "32:imagenet:2"])
        gpu.main()
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert records.keys() == {f"gpu_{call}" for call in calls}
    made = {"run": tables.gpu_run, "best": tables.speed_on_gpu, "folded": tables.speed_on_gpu}
    made |= {"position": tables.MEASUREMENTS["gpu_kernels"]}
    shown = made.get(calls[0], lambda: step_vs_pytorch.table(records[f"gpu_{calls[0]}"]))()
    if calls[0] not in gpu.COMPARED:
        assert {"run": "0 failed", "position": "weight gradient"}[calls[0]] in shown
        return
    [case] = records[f"gpu_{calls[0]}"]["cases"]
    missing = {name for name in gpu.COMPARED[calls[0]] if name.startswith("torch")} if not find_spec("torch") else set()
    assert case["failed"].keys() == missing
    assert case["rows"].keys() == {*gpu.COMPARED[calls[0]]} - missing
    assert case["rounds"] == len(case["rows"]["jaxdp"]["seconds"]) == 5
    assert all(step_vs_pytorch.TITLES.get(name, name) in shown for name in gpu.COMPARED[calls[0]])


@pytest.mark.slow
@pytest.mark.skipif(aot.unavailable_reason() is not None, reason=str(aot.unavailable_reason()))
@pytest.mark.parametrize("form", ["separate", "folded"])
def test_step_of_the_calls_compiles_for_a_gpu(gpu, form):
    """ResNet-50 in bfloat16 with batch 256, by XLA's GPU compiler, without a GPU."""
    flags = [*gpu.STEP[gpu.STEP.index("--config") :], *gpu.sized(gpu.ONE), "--model.batch-norm", form]
    size = flags.index("--batch-size")  # of `jaxdp bench`
    command = [sys.executable, "-m", "jaxdp", "plan", *flags[:size], *flags[size + 2 :], "--json"]
    command += ["--compile-for", "h100", "--hosts", "1", "--gpus-per-host", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)["compiled"]
    assert compiled["memory_bytes"] < compiled["device_memory_bytes"] / 4  # up to four are measured alternately
    assert compiled["collectives"] == []
