"""`jaxdp doctor --verify`: its proofs hold, and fail where what they prove is not so."""

import json
import math
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import lax

from jaxdp import cli
from jaxdp.bench import scaling
from jaxdp.config import Compile, Config
from jaxdp.doctor import gradients, resuming, verify
from jaxdp.doctor.proof import largest_difference, proven
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES, VERTICAL
from jaxdp.registry import own_strategies
from jaxdp.training.loop import Run


def silent(text):
    pass


def measured(devices, batch):
    """What `jaxdp bench scaling` measures on so many devices, made up."""
    row = {"devices": devices, "global_batch": batch, "images_per_second": 1e3 * devices}
    return row | {"step_seconds": 0.01, "exposed_communication_seconds": 0.001}


def of_two_devices(monkeypatch, strategies):
    """Verdict by proof, for these strategies alone."""
    monkeypatch.setattr(allreduce, "STRATEGIES", strategies)
    return {one.proof: one for one in gradients.proofs(jax.devices()[:2], Compile(), silent)}


def test_a_strategy_that_sums_where_it_should_average_over_an_axis_fails_on_the_meshes_that_have_it(monkeypatch):
    def wrong(vector):
        return lax.psum(vector, AXES) * lax.axis_size(VERTICAL)

    found = of_two_devices(monkeypatch, {"torus": (wrong,)})
    assert {name: one.passed for name, one in found.items()} == {
        "gradient: torus on 1x2": True,
        "same bits: torus on 1x2": True,
        "gradient: torus on 2x1": False,
        "same bits: torus on 2x1": True,
    }
    assert found["gradient: torus on 1x2"].difference < 1e-6
    assert found["gradient: torus on 2x1"].difference == pytest.approx(1 / 1.1, abs=0.1)  # twice the gradient


def test_the_strategy_of_the_recipe_is_among_the_proofs(monkeypatch):
    monkeypatch.setitem(own_strategies, "mine", (lambda vector: lax.psum(vector, AXES),))
    monkeypatch.setattr(gradients, "shapes", lambda _: [(1, 2)])
    found = of_two_devices(monkeypatch, {})
    assert {name: one.passed for name, one in found.items()} == {"gradient: mine on 1x2": True, "same bits: mine on 1x2": True}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "at"), [(signal.SIGINT, "the step with"), (signal.SIGTERM, "a run that is")])
def test_interrupted_proofs_end_with_one_line_and_nothing_written(tmp_path, number, at):
    output, temporary = tmp_path / "proofs.json", tmp_path / "temporary"
    temporary.mkdir()
    script = f"""
import os, signal, sys, threading
from jaxdp import cli
from jaxdp.doctor import gradients
from jaxdp.parallel import allreduce
from jaxdp.training.console import Screen

allreduce.STRATEGIES = {{"psum": allreduce.STRATEGIES["psum"]}}
gradients.shapes = lambda _: [(1, 2)]
say = Screen.say

def said(self, text):
    say(self, text)
    if text.startswith({at!r}):
        threading.Timer(3, os.kill, (os.getpid(), {int(number)})).start()

Screen.say = said
cli.main(["doctor", "--verify", "--mesh.cpu-devices", "2", "--output", {str(output)!r}])
"""
    environment = os.environ | {"TMPDIR": str(temporary), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "jaxdp: interrupted"
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not output.exists()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(("devices", "counts"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (17, (1, 2, 4, 8, 16, 17))])
def test_scaling_is_measured_up_to_all_devices(monkeypatch, devices, counts):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(scaling, "make_mesh", lambda *shape: SimpleNamespace(size=math.prod(shape), devices=np.empty(shape)))
    monkeypatch.setattr(scaling, "_measured", lambda config, mesh, batch, repeats: measured(mesh.size, batch))
    found = list(verify._scaling(devices, Compile(), silent))
    assert [one.reason for one in found] == [None] * len(counts)
    assert [one.proof for one in found] == [f"scaling: {count} of {devices}" for count in counts]
    assert all(f" {8 * count} images" in one.compared for one, count in zip(found, counts, strict=True))


@pytest.mark.slow
def test_devices_that_end_with_different_bits_fail(monkeypatch):
    def nearly(vector):
        return lax.psum(vector, AXES) * (1 + 1e-6 * lax.axis_index(AXES))

    monkeypatch.setattr(gradients, "shapes", lambda _: [(1, 2)])
    found = of_two_devices(monkeypatch, {"ring": (nearly,)})
    assert found["gradient: ring on 1x2"].passed  # of the first device, well within what is allowed
    assert not found["same bits: ring on 1x2"].passed


def test_a_step_that_cannot_be_compiled_is_a_failed_proof_with_the_reason(monkeypatch):
    def broken(vector):
        raise RuntimeError("no such link\nand more")

    monkeypatch.setattr(gradients, "of_one_device", lambda *_: {})
    found = of_two_devices(monkeypatch, {"psum": (broken,)})
    assert [one.passed for one in found.values()] == [False, False]
    assert found["gradient: psum on 1x2"].reason == "RuntimeError: no such link"


def test_a_difference_is_none_only_where_every_bit_is_the_same():
    one = {"a": np.array([0.0, 1.0], np.float32), "b": np.array([3], np.int32)}
    assert largest_difference(one, {name: value.copy() for name, value in one.items()}) == 0
    assert largest_difference(one, one | {"a": np.array([0.0, 1.5], np.float32)}) == 0.5
    assert 0 < largest_difference(one, one | {"a": np.array([-0.0, 1.0], np.float32)}) < 1e-300
    assert largest_difference(one, one | {"a": np.array([np.nan, 1.0], np.float32)}) == math.inf
    assert largest_difference(one, {"a": one["a"]}) == math.inf


@pytest.mark.parametrize(("difference", "passed"), [(1e-6, True), (1e-5, True), (2e-5, False), (math.nan, False)])
def test_a_proof_passes_up_to_what_is_allowed(difference, passed):
    assert proven("a", "b", 1e-5, lambda: difference).passed is passed


def test_the_table_has_what_failed_by_itself_and_its_name_is_in_the_last_line():
    rows = [
        proven("gradient: torus on 1x4", "with one device", 1e-5, lambda: 2e-7),
        proven("gradient: torus on 2x2", "with one device", 1e-5, lambda: 0.5),
        proven("gradient: torus on 4x1", "with one device", 1e-5, lambda: math.inf),
    ]
    record = {"device": "4 x cpu", "virtual": False, "seconds": 3.0, "failed": [one.proof for one in rows if not one.passed]}
    record["proofs"] = [one.as_dict() | {"verdict": one.verdict} for one in rows]
    table, last = verify.shown(record)
    names = ["gradient: torus on 1x4", "gradient: torus on 2x2", "gradient: torus on 4x1"]
    assert [cell.splitlines()[0] for cell in table.columns[0].cells] == names
    assert list(table.columns[1].cells) == ["2.0e-07", "5.0e-01", "inf"]
    assert last == "3 proofs on 4 x cpu in 3 s; FAILED: gradient: torus on 2x2, gradient: torus on 4x1"
    assert [row["difference"] for row in json.loads(verify.to_json(record))["proofs"]] == [2e-7, 0.5, None]


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_bits_fails(monkeypatch):
    """One parameter, moved by a millionth where the run goes on."""
    begin = Run._begin

    def moved(self):
        begin(self)
        if self.progress.sessions > 1:
            self.state = self.state._replace(params=jax.tree.map(lambda p: p * (1 + 1e-6), self.state.params))

    assert resuming.proof(4, 4, Compile()).passed
    monkeypatch.setattr(Run, "_begin", moved)
    found = resuming.proof(4, 4, Compile())
    assert found.passed is False
    assert found.difference > 0


@pytest.mark.slow
def test_all_proofs_hold_here_and_are_written_with_provenance(capsys, tmp_path):
    cli.main(["doctor", "--verify", "--mesh.cpu-devices", "2", "--json", "--output", str(tmp_path / "made/proofs.json")])
    out, _ = capsys.readouterr()
    told = json.loads(out)
    assert told == json.loads((tmp_path / "made/proofs.json").read_text())
    assert told["failed"] == []
    assert {one["proof"].split(":")[0] for one in told["proofs"]} == {"gradient", "same bits", "exact resume", "scaling"}
    gradients_of = [one["proof"] for one in told["proofs"] if one["proof"].startswith("gradient")]
    assert len(gradients_of) == 2 * len(allreduce.STRATEGIES)
    assert told["provenance"]["versions"]["jax"]


@pytest.mark.slow
def test_a_failed_proof_ends_with_code_1_and_is_named(capsys, monkeypatch):
    monkeypatch.setattr(allreduce, "STRATEGIES", {"torus": (lambda vector: 2 * lax.psum(vector, AXES),)})
    monkeypatch.setattr(resuming, "proof", lambda *_: proven("exact resume", "", 0, lambda: 0))
    monkeypatch.setattr(verify, "_scaling", lambda *_: [])
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--verify", "--mesh.cpu-devices", "2"])
    assert stopped.value.code == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("FAILED: gradient: torus on 1x2, gradient: torus on 2x1")


def test_what_verify_does_not_use_or_would_overwrite_is_refused(capsys, tmp_path):
    there = tmp_path / "proofs.json"
    there.write_text("kept")
    for flags, message in (
        (["--verify", "--workdir", "a"], "--workdir: 'a' is not allowed with --verify"),
        (["--output", "a"], "--output: 'a' is not allowed without --verify"),
        (["--verify", "--output", str(tmp_path)], "is not allowed; it is a directory; give a file"),
        (["--verify", "--output", ""], "--output: '' is not allowed; give a file"),
        (["--verify", "--output", str(there)], "is not allowed; it is there already; give another file, or --overwrite"),
        (
            ["--verify", "--output", str(there / "a.json")],
            f"is not allowed; {str(there)!r} is no folder that can be written to; give",
        ),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["doctor", *flags])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    assert there.read_text() == "kept"


def test_more_devices_than_one_are_taken_of_a_cpu():
    assert verify.CPU_DEVICES == 4
    assert Config().mesh.cpu_devices is None
    assert gradients.shapes(6) == [(1, 6), (2, 3), (3, 2), (6, 1)]
