"""jaxdp in a notebook: what a cell shows, how it is interrupted, and the notebooks that come with it."""

import ast
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import nbclient
import nbformat
import pytest

import jaxdp
from jaxdp.config import ConfigError, Mesh, Schedule
from jaxdp.training import console, notebook

KERNEL_SECONDS = 1200  # a slow machine is no failure
ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ALLOWED = {"jaxdp", "numpy", "matplotlib"}
STEP = {"epoch": 1.5, "phase": 0, "global_batch": 64, "loss": 0.25, "learning_rate": 0.1, "images_per_second": 300.0}


def short(config, mesh):
    """Five steps of one batch size."""
    phases, schedule = config.batch[-1:], Schedule(warmup_epochs=0.0)
    return dataclasses.replace(config, epochs=1.6, batch=phases, schedule=schedule, mesh=mesh)


class FakeIPython(ModuleType):
    """IPython as `sys.modules` holds it in a kernel: its displays and how often each was updated."""

    def __init__(self, kernel="a kernel"):
        super().__init__("IPython")
        self.version_info = (9, 18, 1, "")  # which matplotlib looks at
        self.displays = []
        self.get_ipython = lambda: SimpleNamespace(kernel=kernel)
        self.display = ModuleType("IPython.display")
        self.display.display = self.shown

    def shown(self, data, raw=False, display_id=False, metadata=None):
        assert raw
        versions = [data]
        self.displays.append(versions)
        return SimpleNamespace(update=lambda data, raw: versions.append(data)) if display_id else None


@pytest.fixture
def kernel(monkeypatch):
    fake = FakeIPython()
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setitem(sys.modules, "IPython.display", fake.display)
    return fake


def test_without_a_kernel_nothing_is_shown_and_ipython_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert type(notebook.screen_here()) is console.Quiet
    assert "IPython" not in sys.modules
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # imported by some library
    assert type(notebook.screen_here()) is console.Quiet
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))  # in a terminal
    assert type(notebook.screen_here()) is console.Quiet


def test_a_run_in_a_kernel_is_one_bar_updated_in_place_some_lines_and_its_picture(tiny, tmp_path, kernel, capsys):
    result = jaxdp.train(short(tiny, Mesh(2, 2, cpu_devices=4)), tmp_path)
    bar, picture = kernel.displays
    assert bar[-1]["text/plain"].startswith(f"step {result.steps}/{result.steps}  done after ")
    assert f'<progress value="{result.steps}" max="{result.steps}">' in bar[-1]["text/html"]
    assert picture[0]["image/png"].startswith("iVBOR")
    shown = capsys.readouterr().out
    assert f"accuracy {100 * result.accuracy:.2f} %" in shown
    assert shown.count("held-out accuracy") == 2
    assert max(map(len, shown.split("results in")[0].splitlines())) <= notebook.WIDTH


def test_the_bar_changes_at_most_a_few_times_a_second(kernel, monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(notebook.time, "monotonic", lambda: now.seconds)
    screen = notebook.Notebook()
    screen.begin(2000)
    for step in range(1, 1001):
        screen.step(STEP | {"step": step})
        now.seconds += 0.01
    screen.end()
    screen.end()
    (bar,) = kernel.displays
    assert 10 / notebook.UPDATE_SECONDS * 0.9 <= len(bar) <= 10 / notebook.UPDATE_SECONDS + 2
    assert bar[-1]["text/plain"].startswith("step 1000/2000  stopped after 0:10  epoch 1.5  loss 0.250")


def test_markup_in_a_text_is_escaped(kernel):
    screen = notebook.Notebook()
    screen.busy("<b>compiling</b>")
    assert kernel.displays[0][0]["text/html"] == "<code>&lt;b&gt;compiling&lt;/b&gt; ...</code>"


def test_a_run_may_be_silent_in_a_kernel(tiny, tmp_path, kernel, capsys):
    jaxdp.train(short(tiny, Mesh(1, 2, cpu_devices=4)), tmp_path, screen=False)
    assert kernel.displays == []
    assert capsys.readouterr().out == ""


def test_the_errors_that_users_see_render_as_one_line_in_a_notebook():
    for error in (jaxdp.Stopped("saved"), jaxdp.ConfigError("wrong"), jaxdp.TrainingError("lost")):
        assert error._render_traceback_() == [f"{type(error).__name__}: {error}"]


def test_a_second_run_in_the_process_may_have_another_mesh_of_the_devices_first_made(tiny, tmp_path):
    meshes = [Mesh(2, 2, cpu_devices=4), Mesh(1, 2, cpu_devices=2)]
    found = [jaxdp.train(short(tiny, mesh), tmp_path / str(n)) for n, mesh in enumerate(meshes)]
    assert [one.mesh for one in found] == [(2, 2), (1, 2)]
    with pytest.raises(ConfigError, match=r"mesh.cpu_devices: 16 is not allowed; JAX runs in this process with 8 CPU devices"):
        jaxdp.train(dataclasses.replace(tiny, mesh=Mesh(cpu_devices=16)), tmp_path / "more")


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
def test_a_cell_that_is_interrupted_ends_in_one_line_and_goes_on_when_run_again(tmp_path, monkeypatch):
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
            (error,) = [one for one in cell.outputs if one.output_type == "error"]
            assert error.traceback == [f"Stopped: {error.evalue}"]
            assert re.search(r"stopped by SIGINT after step \d+ .*running this cell again goes on from it", error.evalue)
            bar = [one for one in cell.outputs if "text/html" in one.get("data", {})]
            assert len(bar) == 1
            assert re.search(r"step \d+/\d+  stopped after", bar[0].data["text/plain"])
            said = "".join(one.text for one in cell.outputs if one.output_type == "stream")
            assert ("going on from run/checkpoints/" in said) == (session == 2)
            (tmp_path / "run/metrics.jsonl").rename(tmp_path / f"log-{session}")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    client = executed(nbformat.read(path, as_version=4).cells, tmp_path)
    client.execute()


def code_of(path) -> str:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return "\n".join(line for source in cells for line in source.splitlines() if not line.startswith("%"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_jaxdp_and_what_draws(path):
    for node in ast.walk(ast.parse(code_of(path))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert {name.split(".")[0] for name in names} <= ALLOWED, path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_holds_its_outputs_and_nothing_of_a_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    text = json.dumps([{**output, "data": {**output.get("data", {}), "image/png": None}} for output in outputs])
    assert not re.search(r"/(home|root|tmp|Users|usr|var|opt|mnt|work)/|[A-Z]:\\\\", text)


def test_there_are_five_notebooks_small_enough_for_a_repository():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 1_500_000
