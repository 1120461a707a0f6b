"""The calls of benchmarks/gpu.py: names and flags that exist, known without a GPU."""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdp.cli import main
from jaxdp.models.convolution import convolve

SHAPES = (2, 12, 8, 3), (7, 7, 3, 5), (2, 6, 4, 5)
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
                if output.is_dir():
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


def test_first_convolution_over_blocks_of_pixels_is_the_same_function(gpu):
    """The sum of 147 products in another order: a few bits of float32."""
    from step_vs_pytorch import space_to_depth

    images, kernel, cotangent = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(SHAPES))
    expected, pull_expected = jax.vjp(lambda *x: convolve(*x, 2), images, kernel)
    found, pull = jax.vjp(space_to_depth, images, kernel)
    for ours, theirs in zip((found, *pull(cotangent)), (expected, *pull_expected(cotangent)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def test_proofs_are_written_to_a_file(gpu, tmp_path):
    gpu.started(["-c", "print(3)"], tmp_path / "out")
    assert (tmp_path / "out").read_text() == "3\n"


def test_first_goes_on_after_a_failed_call(gpu, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "calls.py"))
    (tmp_path / "calls.py").write_text(
        "import sys\nassert sys.argv[-2:] == ['--cases', '32:small:2']\n"
        "print(sys.argv[1], flush=True)\nsys.exit(3 * (sys.argv[1] == 'run'))"
    )
    with pytest.raises(SystemExit, match=r"failed: run \(3\)"):
        gpu.first(tmp_path, ["32:small:2"])
    assert sorted(capfd.readouterr().out.split()) == sorted([*gpu.TOGETHER, *gpu.ALONE])
