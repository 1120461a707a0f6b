"""train.py: the run that `jaxdp train` and `jaxdp.train` make, in one file."""

import ast
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import Interrupted, Recorder, outcome, train_shown

from jaxdp import session
from jaxdp.session import train as package

SCRIPT = Path(__file__).parent.parent / "train.py"


def functions(source):
    """Name -> code of the functions at the top of a file."""
    return {node.name: ast.unparse(node) for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def test_the_script_and_the_package_compose_the_same_parts():
    script, own = functions(SCRIPT.read_text()), functions(inspect.getsource(package))
    assert script.keys() - {"main"} == own.keys() - {"train"}
    assert {name: own[name] for name in script.keys() - {"main"}} == {name: script[name] for name in script.keys() - {"main"}}


def test_every_part_has_a_sentence_and_is_what_type_checkers_see():
    stubs = {
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(inspect.getsource(session)))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxdp.")
        for alias in node.names
    }
    assert stubs.keys() == set(session.__all__)
    for name, place in stubs.items():
        part = getattr(session, name)
        assert f"{part.__module__}.{part.__qualname__}" == place
        assert part.__doc__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = session.nothing


def test_the_script_uses_every_part():
    assert {*re.findall(r"\bsession\.(\w+)", SCRIPT.read_text())} == set(session.__all__)


def test_the_script_starts_without_jax_so_that_signals_are_handled_first():
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_two_functions_lead_from_the_script_to_the_start_of_a_step(tiny, tmp_path, monkeypatch):
    script, stacks = runpy.run_path(str(SCRIPT)), []

    def started(*_):
        stacks.append([frame.function for frame in inspect.stack() if frame.filename == str(SCRIPT)])
        raise Interrupted

    monkeypatch.setattr(session, "start_step", started)
    with pytest.raises(Interrupted):
        script["train_job"](session.Job(tiny, tmp_path / "run", screen=Recorder()))
    assert stacks == [["train_phase", "train_job"]]


def test_a_changed_copy_of_the_script_trains_as_the_package(tiny, tmp_path):
    """The copy also counts its steps."""
    line = "session.start_step(run, step, batch)"
    assert line in SCRIPT.read_text()
    copy, steps = tmp_path / "mine.py", []
    copy.write_text(SCRIPT.read_text().replace(line, f"STEPS.append(run.progress.steps), {line}"))
    script = runpy.run_path(str(copy), {"STEPS": steps})
    result = script["train_job"](session.Job(tiny, tmp_path / "copy", screen=Recorder()))
    train_shown(tiny, tmp_path / "package", screen=Recorder())
    assert steps == [*range(result.steps)]
    assert outcome(tmp_path / "copy") == outcome(tmp_path / "package")
