"""`jaxdp doctor --verify` as a whole: its record and its command, and the proofs of reductions."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from helpers.strategies import replace_strategies
from jax import lax

from jaxdp.cli import main
from jaxdp.config import Config, Data, Mesh, Model
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.doctor import verify, verify_resume
from jaxdp.doctor.proof import prove
from jaxdp.models.resnet import TWO_BLOCKS
from jaxdp.parallel.mesh import AXES
from jaxdp.sizes import model_summary
from jaxdp.strategies import STRATEGIES

SMALL = ["--model.depth", "18", "--model.width", "8"]


@pytest.mark.slow
def test_verify_over_two_processes_passes_and_removes_its_files(tmp_path):
    script = f"""
from jaxdp.cli import main
from jaxdp.models import resnet
from jaxdp.strategies import STRATEGIES

resnet.BLOCKS[18] = resnet.BLOCKS[resnet.TWO_BLOCKS]
for name in {{*STRATEGIES}} - {{"psum", "torus"}}:
    del STRATEGIES.entries[name]
main.main(["doctor", "--verify", "--mesh.cpu-devices", "1", *{SMALL!r}, "--json"])
"""
    launch = [sys.executable, "-m", "jaxdp", "launch", "--processes", "2", "--"]
    done = subprocess.run([*launch, sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads("\n".join(line.partition("] ")[2] for line in done.stdout.splitlines()))
    assert record["device"] == "2 x cpu of 2 processes"
    assert record["failed"] == []
    kinds = [proof["name"].split(":")[0] for proof in record["proofs"]]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "gradient": 3,
        "same bits": 3,
        "exact sums": 2,
        "exact resume": 1,
    }
    assert not list((tmp_path / "runs").glob("*"))


def test_proofs_are_on_the_mesh_of_the_recipe_and_with_thorough_on_all(tiny, monkeypatch):
    seen, lines = [], []

    def gradients(devices, compile, *, shapes, info, group):
        seen.append(shapes)
        yield prove("gradient: torus on 1x2", "", tolerance=0, difference=lambda: 0)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify.verify_gradients, "proofs", gradients)
    monkeypatch.setattr(verify, "sum_proofs", stop)
    for thorough in (False, True):
        record = verify.run(tiny, lines.append, thorough=thorough)
        assert (record["stopped"], [proof["name"] for proof in record["proofs"]]) == (True, ["gradient: torus on 1x2"])
        assert verify.summarize(record).endswith("; stopped; those before it passed")
    assert seen == [[(2, 2)], [(1, 4), (2, 2), (4, 1)]]
    assert [line for line in lines if line.startswith("  gradient: torus on 1x2 (): passed")] != []


@pytest.mark.slow
def test_verify_passes_on_this_machine_and_prints_its_record(tiny, capsys):
    main.main(["doctor", "--verify", "--thorough", "--mesh.cpu-devices", "2", *SMALL, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["failed"] == []
    names = [proof["name"] for proof in record["proofs"]]
    assert {name.split(":")[0] for name in names} == {"gradient", "same bits", "exact sums", "exact resume"}
    forms = len(STRATEGIES) + sum(strategy.scatters for strategy in STRATEGIES.values())  # also with a sharded update
    assert sum(name.startswith("gradient") for name in names) == 2 * forms
    assert record["provenance"]["versions"]["jax"]


@pytest.mark.slow
def test_verify_with_a_failed_proof_exits_with_1_and_names_it(capsys, monkeypatch):
    replace_strategies(monkeypatch, {"torus": (lambda vector: 2 * lax.psum(vector, AXES),)})
    passed = prove("exact resume", "", tolerance=0, difference=lambda: 0)
    monkeypatch.setattr(verify_resume, "proof", lambda *_, **__: passed)
    with pytest.raises(SystemExit) as stopped:
        main.main(["doctor", "--verify", "--thorough", "--mesh.cpu-devices", "2", *SMALL])
    assert stopped.value.code == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("FAILED: gradient: torus on 1x2, gradient: torus on 2x1, exact sums: torus on 1x2")


RECIPE = Config(model=Model(depth=TWO_BLOCKS, width=4, stem="small", classes=6), data=Data(source="synthetic", image_size=16))


def test_proofs_hold_for_every_strategy_on_the_mesh_of_the_recipe():
    config = dataclasses.replace(RECIPE, mesh=Mesh(vertical=4, horizontal=2))
    proofs = list(verify.sum_proofs(config, jax.devices(), info=print, group=ProcessGroup()))
    assert [proof.name for proof in proofs] == [f"exact sums: {name} on 4x2" for name in STRATEGIES]
    assert [(proof.passed, proof.difference) for proof in proofs] == [(True, 0)] * len(proofs)
    assert f"{4 * model_summary(RECIPE)['parameters']:,} bytes of float32" in proofs[0].comparison


def test_proof_of_a_sum_without_one_element_fails(monkeypatch):
    def faulty(vector):
        lost = (lax.axis_index(AXES) == 1) & (jnp.arange(vector.size) == vector.size - 1)
        return lax.psum(jnp.where(lost, 0, vector), AXES)

    replace_strategies(monkeypatch, {"torus": (faulty,)})
    (proof,) = verify.sum_proofs(RECIPE, jax.devices()[:2], info=print, group=ProcessGroup())
    assert (proof.passed, proof.difference) == (False, verify.CALLS)


def test_mesh_shape_of_a_recipe_that_does_not_fit_is_the_most_square_one():
    assert verify.mesh_shape(dataclasses.replace(RECIPE, mesh=Mesh(vertical=48, horizontal=72)), 8, 1) == (2, 4)
