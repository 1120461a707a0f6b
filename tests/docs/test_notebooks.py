"""Tests of the notebooks, and of runs in a notebook kernel."""

import dataclasses
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import nbclient
import nbformat
import pytest

import jaxdp
from jaxdp.config import Mesh, Schedule

KERNEL_SECONDS = 1200  # timeout per cell, sufficient on a slow machine
ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def short(config, mesh):
    """Five steps of one batch size."""
    phases, schedule = config.batch[-1:], Schedule(warmup_epochs=0.0)
    return dataclasses.replace(config, epochs=1.6, batch=phases, schedule=schedule, mesh=mesh)


def test_second_run_in_a_process_may_use_another_mesh(tiny, tmp_path):
    meshes = [Mesh(2, 2, cpu_devices=4), Mesh(1, 2, cpu_devices=2)]
    results = [jaxdp.train(short(tiny, mesh), tmp_path / str(n)) for n, mesh in enumerate(meshes)]
    assert [result.mesh for result in results] == [(2, 2), (1, 2)]


LONG_RUN = """
import jaxdp
flags = "--data.source synthetic --data.image-size 8 --data.train-examples 64 --data.eval-examples 10 --model.depth 18"
flags += " --model.width 2 --model.stem small --batch.0.global-batch 8 --batch.0.until-epoch 8 --batch.1.global-batch 16"
flags += " --data.augmentation none --epochs 600 --checkpoint.every-epochs None --evaluation.every-epochs 500"
config = jaxdp.load_config("digits", flags.split())
jaxdp.train(config, "run")
"""


def executed(cells, directory, **options):
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(directory)}}
    return nbclient.NotebookClient(notebook, timeout=KERNEL_SECONDS, kernel_name="python3", resources=resources, **options)


@pytest.mark.slow
def test_interrupted_cell_ends_in_one_line_and_resumes_when_run_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cell = nbformat.v4.new_code_cell(LONG_RUN)
    client = executed([cell], tmp_path, allow_errors=True)

    def interrupt():
        log = tmp_path / "run/metrics.jsonl"
        while not (log.exists() and log.stat().st_size):
            time.sleep(0.1)
        os.kill(client.km.provisioner.pid, signal.SIGINT)

    with client.setup_kernel():
        for session in (1, 2):
            threading.Thread(target=interrupt, daemon=True).start()
            client.execute_cell(cell, 0)
            (error,) = [output for output in cell.outputs if output.output_type == "error"]
            assert error.traceback == [f"Stopped: {error.evalue}"]
            assert re.search(r"stopped by SIGINT after step \d+ .*running this cell again continues from it", error.evalue)
            bar = [output for output in cell.outputs if "text/html" in output.get("data", {})]
            assert len(bar) == 1
            assert re.search(r"step \d+/\d+  stopped after", bar[0].data["text/plain"])
            text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
            assert ("resuming from run/checkpoints/" in text) == (session == 2)
            (tmp_path / "run/metrics.jsonl").rename(tmp_path / f"log-{session}")


# Fewer epochs than in the stored notebooks, whose outputs have the accuracies.
SHORTER = {
    "01_quickstart": {"epochs=5,": "epochs=2,"},
    "03_large_batch": {"LARS_RATE = 12,": "LARS_RATE = 4,"},
    "05_your_own": {"epochs=10,": "epochs=2,", "epochs=30.0": "epochs=4.0", "epochs=12.0": "epochs=4.0"},
    "06_parts": {"EPOCHS = 64, 5": "EPOCHS = 64, 2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = nbformat.read(path, as_version=4).cells
    for text, shorter in SHORTER.get(path.stem, {}).items():
        (cell,) = [cell for cell in cells if text in cell.source]
        cell.source = cell.source.replace(text, shorter)
    executed(cells, tmp_path).execute()


def test_modules_in_the_stored_notebook_classified_more_than_97_percent_of_the_digits():
    cells = nbformat.read(ROOT / "notebooks/05_your_own.ipynb", as_version=4).cells
    text = "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))
    accuracies = re.findall(r"^accuracy (\S+) % .*360 held-out images", text, re.MULTILINE)
    assert len(accuracies) == 2
    assert min(map(float, accuracies)) > 97


def test_modules_in_the_notebook_are_the_recipes():
    sources = [cell.source for cell in nbformat.read(ROOT / "notebooks/05_your_own.ipynb", as_version=4).cells]
    written = dict(
        source.removeprefix("%%writefile ").split("\n", 1) for source in sources if source.startswith("%%writefile ")
    )
    assert sorted(written) == ["digits_convnext.py", "digits_vit.py"]
    for name, text in written.items():
        assert text + "\n" == (ROOT / "configs" / name).read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_notebook_has_outputs_and_no_local_paths(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    text = json.dumps([{**output, "data": {**output.get("data", {}), "image/png": None}} for output in outputs])
    assert not re.search(r"/(home|root|tmp|Users|usr|var|opt|mnt|work)/|[A-Z]:\\\\", text)
