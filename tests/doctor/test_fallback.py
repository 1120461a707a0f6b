"""`jaxdp doctor` in environments with missing or broken packages, as a command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from importlib import metadata
version = metadata.version
def version_unless_missing(name):
    if name in {missing!r}:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = version_unless_missing
"""


@pytest.fixture
def jaxdp(tmp_path):
    """jaxdp(*arguments): run the command with tmp_path first on the module path."""

    def run(*arguments):
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "jaxdp", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stdout + done.stderr
        return done

    return run


def test_doctor_without_pydantic_prints_the_fallback_report(jaxdp, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(MISSING.format(missing=("pydantic",)))
    done = jaxdp("doctor")
    assert done.returncode == 1, done.stderr
    assert "fix: pip install 'pydantic>=" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 error: packages. Fix these first; the remaining checks were skipped."
    assert jaxdp("--help").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("missing", [("numpy",), ("packaging", "tyro"), ("jax", "jaxlib")])
def test_doctor_with_missing_packages_names_them(jaxdp, tmp_path, missing):
    (tmp_path / "sitecustomize.py").write_text(MISSING.format(missing=missing))
    done = jaxdp("doctor", "--json")
    assert done.returncode == 1, done.stderr
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["python"]["status"] == "ok"
    (message,) = [part for part in checks["packages"]["message"].split("; ") if part.startswith("not installed: ")]
    for name in missing:
        if name != "jaxlib":  # a dependency of jax, which jaxdp does not declare
            assert name in message
            assert f"'{name}>=" in checks["packages"]["fix"]
    assert "cannot import" not in checks["packages"]["message"]


@pytest.mark.slow
def test_doctor_and_train_with_a_package_that_cannot_be_imported_name_it(jaxdp, tmp_path):
    (tmp_path / "optax.py").write_text("raise RuntimeError('no such\\nsymbol')")
    done = jaxdp("doctor", "--json")
    assert done.returncode == 1, done.stderr
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["packages"]["message"].split("; ")[1:] == ["cannot import optax: RuntimeError: no such"]
    assert "JAX was not started: cannot import optax" in checks["devices"]["message"]
    done = jaxdp("train")
    assert done.returncode == 1
    assert "optax" in done.stderr.splitlines()[-1]
    assert "`jaxdp doctor`" in done.stderr.splitlines()[-1]
