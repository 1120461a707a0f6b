import contextlib
import dataclasses
import io
import sys
from types import ModuleType, SimpleNamespace

import flax.nnx  # noqa: F401 - it imports IPython, which must not be the stand-in
import pytest

import jaxdp
from jaxdp.config import Schedule
from jaxdp.loggers import console, notebook

STEP = {"epoch": 1.5, "phase": 0, "global_batch": 64, "loss": 0.25, "learning_rate": 0.1, "images_per_second": 300.0}


class FakeIPython(ModuleType):
    """A stand-in for IPython in a kernel that records the versions of every display."""

    def __init__(self, kernel="a kernel"):
        super().__init__("IPython")
        self.version_info = (9, 18, 1, "")  # read by matplotlib
        self.displays = []
        self.get_ipython = lambda: SimpleNamespace(kernel=kernel)
        self.display = ModuleType("IPython.display")
        self.display.display = self.record_display

    def record_display(self, data, raw=False, display_id=False, metadata=None):
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


def test_default_screen_without_a_kernel_prints_lines_and_does_not_import_ipython(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert type(notebook.default_screen()) is console.Screen
    assert "IPython" not in sys.modules
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # imported by some library
    assert type(notebook.default_screen()) is console.Screen
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))  # in a terminal
    assert type(notebook.default_screen()) is console.Screen


@pytest.mark.slow
def test_train_in_a_kernel_shows_one_bar_some_lines_and_the_plot(tiny, plots, tmp_path, kernel, capsys):
    config = dataclasses.replace(tiny, epochs=1.6, batch=tiny.batch[-1:], schedule=Schedule(warmup_epochs=0.0))
    result = jaxdp.train(config, tmp_path)  # five steps
    bar, plot = kernel.displays
    assert bar[-1]["text/plain"].startswith(f"step {result.steps}/{result.steps}  done after ")
    assert f'<progress value="{result.steps}" max="{result.steps}">' in bar[-1]["text/html"]
    assert plot[0]["image/png"].startswith("iVBOR")
    output = capsys.readouterr().out
    assert f"accuracy {100 * result.accuracy:.2f} %" in output
    assert output.count("held-out accuracy") == 2
    lines = [line for line in output.split("results in")[0].splitlines() if "few for batch normalization" not in line]
    assert max(map(len, lines)) <= notebook.WIDTH


def test_default_screen_in_a_kernel_with_redirected_stdout_prints_lines(kernel):
    with contextlib.redirect_stdout(io.StringIO()):
        assert type(notebook.default_screen()) is console.Screen
    assert type(notebook.default_screen()) is notebook.Notebook


def test_step_updates_the_bar_at_most_every_update_interval(kernel, monkeypatch):
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
    assert bar[-1]["text/plain"].startswith("step 1000/2000  stopped after 0:10  epoch 1.5  training loss 0.250")


def test_status_escapes_markup(kernel):
    screen = notebook.Notebook()
    screen.status("<b>compiling</b>")
    assert kernel.displays[0][0]["text/html"] == "<code>&lt;b&gt;compiling&lt;/b&gt; ...</code>"
