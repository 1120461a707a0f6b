"""The files of an open project: the workflow on GitHub runs what CONTRIBUTING.md says, on the versions of pyproject.toml."""

import re
import tomllib

import yaml
from helpers.processes import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands(job):
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


def test_workflow_runs_the_checks_of_contributing():
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    checks = [*commands("lint"), *commands("tests"), *commands("slow")]
    for command in ("ruff check .", "ruff format --check .", "mypy", "python -m pytest -q", ".ci/run"):
        assert command in checks
        assert re.search(rf"(^|/){re.escape(command)}( |$)", contributing, re.MULTILINE), command


def test_workflow_tests_the_oldest_and_the_newest_python_of_the_classifiers():
    named = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.fullmatch(r"Programming .* :: 3\.\d+", name)]
    rows = WORKFLOW["jobs"]["tests"]["strategy"]["matrix"]["include"]
    assert {row["resolution"]: row["python"] for row in rows} == {"lowest-direct": named[0], "highest": named[-1]}
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_every_dependency_has_a_minimum_which_the_job_of_the_oldest_versions_installs():
    extras = PROJECT["optional-dependencies"].values()
    assert [name for group in (PROJECT["dependencies"], *extras) for name in group if ">=" not in name] == []


def test_wheel_is_built_checked_and_installed():
    text = "\n".join(commands("wheel"))
    assert all(part in text for part in ("python -m build", "twine check --strict", "pip install dist/*.whl"))
