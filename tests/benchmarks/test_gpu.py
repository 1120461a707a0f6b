"""The calls of benchmarks/gpu.py: names and flags that exist, known without a GPU."""

import json
import re
import sys
from pathlib import Path

import pytest

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
    (tmp_path / "gpu_pytorch.json").write_text(
        json.dumps({"cases": [{"rows": {name: {"step_seconds": 1.0} for name in ("torch", "torch-max")}}]})
    )

    def commands_of(call):
        found = []

        def started(words):
            found.append(words)
            if "--output" in words:
                output = Path(words[words.index("--output") + 1])
                if output.is_dir():
                    (output / "step.json").write_text("{}")
            else:
                (Path(words[words.index("--workdir") + 1]) / "result.json").write_text("{}")

        monkeypatch.setattr(gpu, "started", started)
        monkeypatch.setattr(sys, "argv", ["gpu.py", call, "--results", str(tmp_path)])
        gpu.main()
        return found

    return commands_of


@pytest.mark.parametrize("call", ["pytorch", "changes", "flags", "batches", "best"])
def test_contenders_of_a_call_exist(commands, call):
    import step_vs_pytorch

    [words] = commands(call)
    names = words[words.index("--only") + 1 : words.index("--cases")]
    known = {*step_vs_pytorch.GPU_NAMES, *(f"jaxdp:{name}" for name in step_vs_pytorch.VARIANTS)}
    assert names
    assert {*names} <= known


@pytest.mark.parametrize("call", ["position", "start"])
def test_flags_of_a_call_exist(commands, call, capsys):
    with pytest.raises(SystemExit):
        main.main(["bench", "step", "--help", "all"])
    offered = capsys.readouterr().out
    for words in commands(call):
        flags = [word for word in words if re.match(r"--[a-z]", word)]
        assert [flag for flag in flags if flag.replace("batch.0", "batch.N") not in offered and flag not in offered] == []


def test_the_run_is_the_default_one(commands):
    [words] = commands("run")
    assert words[:2] == ["train.py", "--workdir"]
