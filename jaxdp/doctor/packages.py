"""Python and the packages that jaxdp declares: there, as new as declared, and fit to be imported.

Imports the standard library alone, so that it can tell what is missing. `python -m jaxdp.doctor.packages` prints one line of
JSON: the packages that are installed and cannot be imported, each with the reason.
"""

import importlib
import json
import platform
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions, requires, version
from pathlib import Path

import jaxdp
from jaxdp.doctor.finding import Findings
from jaxdp.errors import first_line, not_imported

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
MODULES = {"opencv-python-headless": "cv2", "orbax-checkpoint": "orbax.checkpoint", "pillow": "PIL", "scikit-learn": "sklearn"}


def declared() -> tuple[str, list[str]]:
    """(the versions of Python, the dependencies without extras) that jaxdp declares: of the checkout, or as installed."""
    checkout = Path(jaxdp.__file__).parent.parent / "pyproject.toml"
    if checkout.is_file():
        project = tomllib.loads(checkout.read_text())["project"]
        return project["requires-python"], project["dependencies"]
    python = metadata("jaxdp")["Requires-Python"] or ""
    return python, [one for one in requires("jaxdp") or () if "extra ==" not in one]


def installed(name: str) -> str | None:
    """The version of a package, by its metadata alone."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def named(requirement: str) -> str:
    """The package of a requirement: numpy of numpy>=2.4."""
    return re.match(r"[A-Za-z0-9._-]*[A-Za-z0-9]", requirement)[0]


def module_of(package: str) -> str:
    """What a program imports of a package."""
    return MODULES.get(package, package.replace("-", "_"))


def python(findings: Findings) -> None:
    """The version of Python is one that jaxdp declares."""
    allowed, here = declared()[0], platform.python_version()
    try:
        from packaging.specifiers import SpecifierSet
    except Exception as error:  # of which `packages` tells
        return findings.ok(f"{here} (declared: {allowed}; not compared without {not_imported(error)})")
    if SpecifierSet(allowed).contains(here, prereleases=True):
        findings.ok(f"{here} (declared: {allowed})")
    else:
        findings.wrong(f"{here} (declared: {allowed})", f"make a virtual environment with a Python {allowed}")


def packages(findings: Findings, broken: dict[str, str]) -> None:
    """Every dependency is there in a version that jaxdp declares and can be imported, and jaxlib is the one for this JAX.

    broken: what `unimportable` has found.
    """
    findings.ok(f"jaxdp {jaxdp.__version__}, " + ", ".join(f"{name} {installed(name) or 'missing'}" for name in SHOWN))
    missing = [one for one in declared()[1] if not installed(named(one))]
    if missing:
        told = ", ".join(named(one) for one in missing) + (" is" if len(missing) == 1 else " are")
        findings.wrong(f"{told} not installed", "pip install " + " ".join(f"'{one}'" for one in missing))
    for name, reason in broken.items():
        again = next((f"'{one}'" for one in declared()[1] if named(one) == name), name)
        mend = f"pip install --force-reinstall --no-deps {again} && pip install {again}"  # the second: what it lacks itself
        findings.wrong(f"{name} cannot be imported: {reason}", mend)
    if not installed("packaging") or "packaging" in broken:
        return  # which compares versions
    outdated = _outdated()
    for one in outdated:
        findings.wrong(f"{one.name} {installed(one.name)} is not {one.specifier}", f"pip install '{one.name}{one.specifier}'")
    if not (missing or broken or outdated):
        findings.ok("all that jaxdp needs is installed as declared")


def _outdated() -> list:
    """The requirements whose packages are there in a version that they do not allow."""
    from packaging.requirements import Requirement

    needed = [Requirement(one) for one in declared()[1]]
    if installed("jax"):
        needed += [one for one in map(Requirement, requires("jax") or ()) if one.name == "jaxlib"]
    needed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [one for one in needed if (here := installed(one.name)) and not one.specifier.contains(here, prereleases=True)]


def unimportable() -> dict[str, str]:
    """The first package that is installed and cannot be imported, be it one that another needs, with the reason; {} if none.

    Only the first, as what needs it fails with it; for the same reason none where one is not installed at all. Imports all of
    them into this process; what is being imported is said on stderr, should one end the process.
    """
    ours = {module_of(named(one)).split(".")[0]: named(one) for one in declared()[1]}
    if not all(map(installed, ours.values())):
        return {}
    for name in sorted(ours.values(), key=lambda name: name != "numpy"):  # compiled modules hide its errors
        print(f"while {name} is imported", file=sys.stderr, flush=True)
        try:
            importlib.import_module(module_of(name))
        except (Exception, SystemExit) as error:
            module = not_imported(error)
            at_fault = ours.get(module) or next(iter(packages_distributions().get(module, ())), name)
            return {at_fault: f"{type(error).__name__}: {first_line(error)}"}
    return {}


if __name__ == "__main__":
    print(json.dumps(unimportable()))
