"""`jaxdp doctor --verify` as a whole: its record and its command."""

import json
import subprocess
import sys

import pytest
from helpers.strategies import replace_strategies
from jax import lax

from jaxdp.cli import main
from jaxdp.doctor import verify, verify_resume
from jaxdp.doctor.proof import prove
from jaxdp.parallel.mesh import AXES
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
    monkeypatch.setattr(verify.verify_sums, "proofs", stop)
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
