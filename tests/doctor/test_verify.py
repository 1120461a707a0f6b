"""`jaxdp doctor --verify` as a whole: its record, its table and its command."""

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
from helpers.doctor import ignore
from helpers.strategies import replace_strategies
from jax import lax

from jaxdp.bench import scaling
from jaxdp.cli import main
from jaxdp.config import Compile
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.doctor import verify, verify_resume
from jaxdp.doctor.proof import prove
from jaxdp.parallel.mesh import AXES
from jaxdp.strategies import STRATEGIES

SMALL = ["--model.depth", "18", "--model.width", "8"]


@pytest.mark.slow
def test_verify_over_two_processes_passes_and_removes_its_files(tmp_path):
    output = tmp_path / "proofs.json"
    script = f"""
from jaxdp.cli import main
from jaxdp.models import resnet
from jaxdp.strategies import STRATEGIES

resnet.BLOCKS[18] = resnet.BLOCKS[resnet.TWO_BLOCKS]
for name in {{*STRATEGIES}} - {{"psum", "torus"}}:
    del STRATEGIES.entries[name]
main.main(["doctor", "--verify", "--thorough", "--mesh.cpu-devices", "1", *{SMALL!r}, "--output", {str(output)!r}])
"""
    launch = [sys.executable, "-m", "jaxdp", "launch", "--processes", "2", "--"]
    done = subprocess.run([*launch, sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    assert record["device"] == "2 x cpu of 2 processes"
    assert record["failed"] == []
    kinds = [proof["name"].split(":")[0] for proof in record["proofs"]]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "gradient": 6,
        "same bits": 6,
        "exact sums": 2,
        "exact resume": 1,
        "scaling": 1,
    }
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "phase"), [(signal.SIGINT, "gradients:"), (signal.SIGTERM, "exact resume:")])
def test_verify_when_interrupted_keeps_the_proofs_so_far(tmp_path, number, phase):
    output, temporary = tmp_path / "proofs.json", tmp_path / "temporary"
    temporary.mkdir()
    script = f"""
import os, threading
from jaxdp.cli import main
from jaxdp.doctor import verify_gradients
from jaxdp.loggers.console import Screen
from jaxdp.strategies import STRATEGIES

for name in {{*STRATEGIES}} - {{"psum", "torus"}}:
    del STRATEGIES.entries[name]
verify_gradients.mesh_shapes = lambda _: [(1, 2)]
info = Screen.info

def info_and_interrupt(self, text):
    info(self, text)
    if text.startswith({phase!r}):
        threading.Timer(3, os.kill, (os.getpid(), {int(number)})).start()

Screen.info = info_and_interrupt
main.main(["doctor", "--verify", "--mesh.cpu-devices", "2", "--output", {str(output)!r}])
"""
    environment = os.environ | {"TMPDIR": str(temporary), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "jaxdp: interrupted"
    assert "Traceback" not in done.stderr
    assert f"proofs written to {output}" in done.stdout
    record = json.loads(output.read_text())
    assert (record["stopped"], record["failed"]) == (True, [])
    if phase == "exact resume:":
        assert [proof["name"] for proof in record["proofs"]][:2] == ["gradient: psum on 1x2", "same bits: psum on 1x2"]
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(("devices", "counts"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (17, (1, 2, 4, 8, 16, 17))])
def test_scaling_is_measured_on_powers_of_two_and_on_all_devices(monkeypatch, devices, counts):
    def measure(config, mesh, *, global_batch, repeats):
        row = {"devices": mesh.size, "global_batch": global_batch, "images_per_second": 1e3 * mesh.size}
        exposed = {"exposed_communication_seconds": 0.001, "exposed_communication_interval": [-0.1, 0.2]}
        return row | exposed | {"step_seconds": 0.01}

    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(scaling, "make_mesh", lambda *shape: SimpleNamespace(size=math.prod(shape), devices=np.empty(shape)))
    monkeypatch.setattr(scaling, "_measure", measure)
    proofs = list(verify._measure_scaling(devices, Compile(), info=ignore, group=ProcessGroup()))
    assert [proof.error for proof in proofs] == [None] * len(counts)
    assert [proof.name for proof in proofs] == [f"scaling: {count} of {devices}" for count in counts]
    assert all(f" {8 * count} images" in proof.comparison for proof, count in zip(proofs, counts, strict=True))
    assert [proof.comparison.endswith(", communication 1.0 ms (-100.0 to 200.0)") for proof in proofs] == [
        count > 1 for count in counts
    ]


def test_report_has_a_line_per_failed_proof_and_names_them_in_the_summary():
    proofs = [
        prove("gradient: torus on 1x4", "against one device", tolerance=1e-5, difference=lambda: 2e-7),
        prove("gradient: torus on 2x2", "against one device", tolerance=1e-5, difference=lambda: 0.5),
        prove("gradient: torus on 4x1", "against one device", tolerance=1e-5, difference=lambda: math.inf),
    ]
    failed = [proof.name for proof in proofs if not proof.passed]
    record = {"device": "4 x cpu", "virtual": False, "seconds": 3.0, "failed": failed, "stopped": False}
    record["proofs"] = [proof.to_dict() for proof in proofs]
    table, last = verify.report(record)
    names = ["gradient: torus on 1x4", "gradient: torus on 2x2", "gradient: torus on 4x1"]
    assert [cell.splitlines()[0] for cell in table.columns[0].cells] == names
    assert list(table.columns[1].cells) == ["2.0e-07", "5.0e-01", "inf"]
    assert last == "3 proofs on 4 x cpu in 3 s; FAILED: gradient: torus on 2x2, gradient: torus on 4x1"
    assert [row["difference"] for row in json.loads(verify.to_json(record))["proofs"]] == [2e-7, 0.5, None]


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
    assert [line for line in lines if line.startswith("  gradient: torus on 1x2: passed (")] != []


@pytest.mark.slow
def test_verify_passes_on_this_machine_and_writes_its_record(tiny, capsys, tmp_path):
    output = tmp_path / "made/proofs.json"
    main.main(["doctor", "--verify", "--thorough", "--mesh.cpu-devices", "2", *SMALL, "--json", "--output", str(output)])
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(output.read_text())
    assert record["failed"] == []
    names = [proof["name"] for proof in record["proofs"]]
    assert {name.split(":")[0] for name in names} == {"gradient", "same bits", "exact sums", "exact resume", "scaling"}
    forms = len(STRATEGIES) + sum(strategy.scatters for strategy in STRATEGIES.values())  # also with a sharded update
    assert sum(name.startswith("gradient") for name in names) == 2 * forms
    assert record["provenance"]["versions"]["jax"]


@pytest.mark.slow
def test_verify_with_a_failed_proof_exits_with_1_and_names_it(capsys, monkeypatch):
    replace_strategies(monkeypatch, {"torus": (lambda vector: 2 * lax.psum(vector, AXES),)})
    passed = prove("exact resume", "", tolerance=0, difference=lambda: 0)
    monkeypatch.setattr(verify_resume, "proof", lambda *_, **__: passed)
    monkeypatch.setattr(verify, "_measure_scaling", lambda *_, **__: [])
    with pytest.raises(SystemExit) as stopped:
        main.main(["doctor", "--verify", "--thorough", "--mesh.cpu-devices", "2", *SMALL])
    assert stopped.value.code == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("FAILED: gradient: torus on 1x2, gradient: torus on 2x1, exact sums: torus on 1x2")
