"""Checks of Python and of the packages that jaxdp declares: installed, in a declared version, importable.

Imports the standard library alone, so that it runs if packages are missing. `python -m jaxdp.doctor.packages` prints the
result of `find_unimportable` as one line of JSON.
"""

import importlib
import json
import platform
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

import jaxdp
from jaxdp.doctor.check_result import ResultBuilder
from jaxdp.errors import first_line
from jaxdp.imports import not_imported

if TYPE_CHECKING:
    from packaging.requirements import Requirement

SHOWN_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
IMPORT_NAMES = {
    "opencv-python-headless": "cv2",
    "orbax-checkpoint": "orbax.checkpoint",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
}


def declared_requirements() -> tuple[str, list[str]]:
    """(versions of Python, dependencies without extras) from the checkout's pyproject.toml or the installed metadata."""
    checkout = Path(jaxdp.__file__).parent.parent / "pyproject.toml"
    if checkout.is_file():
        project = tomllib.loads(checkout.read_text())["project"]
        return project["requires-python"], project["dependencies"]
    python = metadata("jaxdp")["Requires-Python"] or ""
    return python, [requirement for requirement in requires("jaxdp") or () if "extra ==" not in requirement]


def installed_version(package: str) -> str | None:
    """Version of a package from its metadata, without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def package_name(requirement: str) -> str:
    """Package of a requirement: numpy for numpy>=2.4."""
    return re.findall(r"^[A-Za-z0-9._-]*[A-Za-z0-9]", requirement)[0]


def import_name(package: str) -> str:
    """Name under which a package is imported."""
    return IMPORT_NAMES.get(package, package.replace("-", "_"))


def check_python(result: ResultBuilder) -> None:
    """The version of Python is one that jaxdp declares."""
    declared, running = declared_requirements()[0], platform.python_version()
    try:
        from packaging.specifiers import SpecifierSet
    except Exception as error:  # `check_packages` reports it
        result.ok(f"{running} (declared: {declared}; not compared without {not_imported(error)})")
        return
    if SpecifierSet(declared).contains(running, prereleases=True):
        result.ok(f"{running} (declared: {declared})")
    else:
        result.error(f"{running} (declared: {declared})", f"create a virtual environment with Python {declared}")


def check_packages(result: ResultBuilder, broken: dict[str, str]) -> None:
    """Every dependency is installed in a declared version and can be imported, and jaxlib matches JAX.

    broken: the result of `find_unimportable`.
    """
    versions = ", ".join(f"{name} {installed_version(name) or 'missing'}" for name in SHOWN_PACKAGES)
    result.ok(f"jaxdp {jaxdp.__version__}, {versions}")
    requirements = {package_name(requirement): requirement for requirement in declared_requirements()[1]}
    missing = [name for name in requirements if not installed_version(name)]
    if missing:
        command = "pip install " + " ".join(f"'{requirements[name]}'" for name in missing)
        result.error(f"not installed: {', '.join(missing)}", command)
    for name, reason in broken.items():
        package = f"'{requirements[name]}'" if name in requirements else name
        fix = f"pip install --force-reinstall --no-deps {package} && pip install {package}"  # the second: its dependencies
        result.error(f"cannot import {name}: {reason}", fix)
    if not installed_version("packaging") or "packaging" in broken:
        return  # versions cannot be compared
    conflicts = _version_conflicts()
    for conflict in conflicts:
        name, allowed = conflict.name, conflict.specifier
        result.error(f"{name} {installed_version(name)} does not satisfy {allowed}", f"pip install '{name}{allowed}'")
    if not (missing or broken or conflicts):
        result.ok("all dependencies are installed as declared")


def _version_conflicts() -> list["Requirement"]:
    """Requirements of jaxdp, and of JAX for jaxlib, whose installed version they do not allow."""
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in declared_requirements()[1]]
    if installed_version("jax"):
        requirements += [requirement for requirement in map(Requirement, requires("jax") or ()) if requirement.name == "jaxlib"]
    return [
        requirement
        for requirement in requirements
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and (installed := installed_version(requirement.name))
        and not requirement.specifier.contains(installed, prereleases=True)
    ]


def find_unimportable() -> dict[str, str]:
    """{package: error} of the first installed package that cannot be imported, which may be a dependency of a declared one.

    Only the first, as packages that depend on it fail with it. {} if all can be imported, or if one is not installed at all.
    Imports all of them into this process; prints each name to stderr before, in case an import ends the process.
    """
    packages = {import_name(name).split(".")[0]: name for name in map(package_name, declared_requirements()[1])}
    if not all(map(installed_version, packages.values())):
        return {}
    for name in sorted(packages.values(), key=lambda name: name != "numpy"):  # compiled extensions hide an error of NumPy
        print(f"importing {name}", file=sys.stderr, flush=True)
        try:
            importlib.import_module(import_name(name))
        except (Exception, SystemExit) as error:
            module = not_imported(error) or ""
            culprit = packages.get(module) or next(iter(packages_distributions().get(module, ())), name)
            return {culprit: f"{type(error).__name__}: {first_line(error)}"}
    return {}


if __name__ == "__main__":
    print(json.dumps(find_unimportable()))
