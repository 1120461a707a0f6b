"""The programs on docs/experiments.md, run as they stand with a small network."""

import json
import re
from pathlib import Path

import pytest

import jaxdp

PAGE = (Path(__file__).parents[2] / "docs/experiments.md").read_text()
PROGRAMS = dict(re.findall(r"## ([^\n]*)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE, re.DOTALL))
SMALL = ["--epochs", "1", "--model.depth", "18", "--model.width", "4", "--logging.no-tensorboard"]


@pytest.mark.slow
@pytest.mark.usefixtures("own_programs", "tiny_resnet")  # of two blocks
@pytest.mark.parametrize("title", PROGRAMS)
def test_program_runs_as_it_stands(title, tmp_path, monkeypatch):
    load_config = jaxdp.load_config
    monkeypatch.setattr(jaxdp, "load_config", lambda recipe, flags: load_config(recipe, [*flags, *SMALL]))
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAMS[title], title, "exec"), {"__name__": "__main__"})
    results = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/result.json")]
    assert len(results) == {
        "Unfreezing in one run": 2,
        "Several seeds": 3,
        "k-fold cross-validation": 5,
        "Hyperparameter search with Optuna": 8,
    }.get(title, 1)
