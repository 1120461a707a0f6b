"""Checks of Python and of the declared packages."""

import importlib

import pytest
from helpers.doctor import run_check

from jaxdp.doctor import packages


def test_check_packages_in_this_environment_is_ok():
    assert run_check(packages.check_packages, broken={}).status == "ok"
    assert run_check(packages.check_python).status == "ok"


def test_check_packages_with_undeclared_versions_reports_errors_and_pip_commands(monkeypatch):
    monkeypatch.setattr(packages, "declared_requirements", lambda: (">=4", ["jax>=99", "no-such-package>=1", "numpy"]))
    result = run_check(packages.check_packages, broken={})
    assert result.status == "error"
    assert result.fix == "pip install 'no-such-package>=1'; pip install 'jax>=99'"
    assert "not installed: no-such-package;" in result.message
    assert run_check(packages.check_python).status == "error"


@pytest.mark.parametrize(
    ("broken", "fix"),
    [
        ("optax", "pip install --force-reinstall --no-deps 'optax"),
        ("absl-py", "pip install --force-reinstall --no-deps absl-py "),
    ],
)
def test_check_packages_with_a_broken_package_reports_it_alone(broken, fix):
    result = run_check(packages.check_packages, broken={broken: "RuntimeError: no such symbol"})
    assert (result.status, result.message.split("; ")[1:]) == (
        "error",
        [f"cannot import {broken}: RuntimeError: no such symbol"],
    )
    assert result.fix.startswith(fix)


@pytest.mark.parametrize(
    ("module", "error", "expected"),
    [
        ("optax", RuntimeError("no such\nsymbol"), {"optax": "RuntimeError: no such"}),
        ("numpy", ImportError("libopenblas is gone"), {"numpy": "ImportError: libopenblas is gone"}),
        ("cv2", SystemExit("broken"), {"opencv-python-headless": "SystemExit: broken"}),
        (
            "optax",
            ModuleNotFoundError("No module named 'absl'", name="absl"),
            {"absl-py": "ModuleNotFoundError: No module named 'absl'"},
        ),
    ],
)
def test_find_unimportable_returns_the_package_at_fault(monkeypatch, module, error, expected):
    def import_module(name):
        if name == module:
            raise error

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert packages.find_unimportable() == expected


def test_find_unimportable_with_a_missing_package_returns_nothing(monkeypatch):
    monkeypatch.setattr(packages, "declared_requirements", lambda: (">=3", ["no-such-package>=1"]))
    assert packages.find_unimportable() == {}
