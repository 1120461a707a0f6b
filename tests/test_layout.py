"""Rules of the code base."""

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from jaxdp.choices import SOURCES

PACKAGE = Path(__file__).parent.parent / "jaxdp"
CORE = [
    "choices",
    "config",
    "config_words",
    "cores",
    "errors",
    "files",
    "fields",
    "flag_help",
    "flag_table",
    "flags",
    "foreign_flags",
    "file_locks",
    "metrics",
    "planning",
    "published",
    "recipes",
    "run_records",
    "registry",
    "schedules",
    "strategies",
    "targets",
    "task",
    "validation",
]
# The rings of jaxdp/, innermost first: folders, and modules beside them. A line imports from those above it, in its ring too.
RINGS = {
    "what a run is, without JAX": ["core"],
    "parts of a step, each usable alone": [
        "xla losses network label_metrics",
        "tasks",
        "registration optim",
        "parallel",
        "models data",
        "sizes",
    ],
    "the run": ["distributed", "checkpoint", "training"],
    "attached": ["cloud", "setup", "loggers", "callbacks", "session"],
    "tools": ["inference analysis", "bench", "report doctor", "cli", "__main__"],
}
IMPLEMENTS = "a table refers to what implements its entries"
EXCEPTIONS = {
    **{f"choices -> {part}": IMPLEMENTS for part in ("data", "losses", "models", "optim", "tasks")},
    **{f"metrics -> {part}": IMPLEMENTS for part in ("losses", "label_metrics")},
    "strategies -> parallel": IMPLEMENTS,
    "planning -> parallel.mesh": "shapes of meshes, which need no JAX",
    "planning -> models.summary": "stages of a ResNet, imported for a batch that may be too small for batch normalization",
    "data.folder -> cloud.source": "imported for a URL",
    "data.folder -> cloud.remote_folder": "imported for a URL",
    "data.tfds -> cloud.source": "imported for a URL",
    "data.tfds -> cloud.remote_prepared": "imported for a URL",
}
MAY_CALL_THE_PUBLIC_FUNCTIONS = {"doctor", "cli"}  # by `import jaxdp`


def folder_of(module: str) -> str:
    """`parallel` of jaxdp.parallel.mesh, `core` of a module in CORE; "" of jaxdp itself."""
    _, _, name = module.partition(".")
    top = name.split(".")[0]
    return "core" if top in CORE else top


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> set[str]:
    """Every module that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            beside = node.module == "jaxdp"
            names |= {f"jaxdp.{alias.name}" for alias in node.names} if beside else {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names - {"jaxdp.__version__"}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_ring_imports_an_outer_one():
    """Imports inside functions and for type checkers count."""
    lines = [line.split() for ring in RINGS.values() for line in ring]
    level = {name: height for height, names in enumerate(lines) for name in names}
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        importer = module_of(path)
        here = folder_of(importer)
        if not here:  # jaxdp/__init__.py imports the public functions when they are first used
            continue
        for module in imported(path):
            there = folder_of(module)
            if module == "jaxdp" and here not in MAY_CALL_THE_PUBLIC_FUNCTIONS:
                found.add(f"{importer} -> jaxdp")
            if module.startswith("jaxdp.") and there != here and level[there] >= level[here]:
                found.add(f"{importer} -> {module}".replace("jaxdp.", ""))
    assert found == EXCEPTIONS.keys()


def test_no_module_imports_itself_through_others():
    """Imports inside functions count, those for type checkers do not."""
    modules = {module_of(path): path for path in PACKAGE.rglob("*.py")}

    def imports(path: Path) -> set[str]:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        return (found & modules.keys()) - {"jaxdp", module_of(path)}

    TopologicalSorter({name: imports(path) for name, path in modules.items()}).prepare()  # raises CycleError with the circle


def test_lines_are_printed_with_what_escapes_control_characters():
    """Not with `print`."""
    raw = {
        module_of(path)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.Name, ast.Attribute))
        and ast.unparse(node) in ("print", "sys.stdout.write", "sys.stderr.write")
    }
    assert raw == {"jaxdp.errors", "jaxdp.cli.report"}  # the latter: a file of CSV on stdout


def test_every_folder_says_what_belongs_there():
    for path in PACKAGE.rglob("*/__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_nothing_private_of_jax_is_imported():
    for path in PACKAGE.rglob("*.py"):
        assert not {name for name in imported(path) if name.startswith("jax._src")}, path


def test_only_the_model_imports_flax():
    for path in PACKAGE.rglob("*.py"):
        if re.search(r"^\s*(import|from) flax", path.read_text(), re.MULTILINE):
            assert path.parent.name == "models", path


# What must not be imported by each module, one after another in one process.
NOT_IMPORTED = {
    "jaxdp": ("jax", "flax", "matplotlib", "sklearn"),
    **{f"jaxdp.{name}": ("jax", "flax", "optax") for name in CORE},
    "jaxdp.training.step": ("flax", "jaxdp.models", "jaxdp.data.batch_sources"),  # it knows no network
    **dict.fromkeys(
        ("jaxdp.session.train", "jaxdp.data.sources", "jaxdp.inference.load_run", "jaxdp.report.server"),
        # what URLs, registered models, single data sources and the reading and writing of checkpoints need
        (
            "jaxdp.cloud",
            "fsspec",
            "obstore",
            "flax.nnx",
            "jaxdp.data.tfds",
            "jaxdp.data.digits",
            "jaxdp.data.synthetic",
            "orbax",
        ),
    ),
}


@pytest.mark.slow
def test_modules_import_no_more_than_they_need():
    code = f"""
import importlib, sys
for name, others in {NOT_IMPORTED!r}.items():
    importlib.import_module(name)
    print([name, *(other for other in others if other in sys.modules)])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [str([name]) for name in NOT_IMPORTED]


def test_every_public_name_is_there():
    import jaxdp

    for name in jaxdp.__all__:
        assert getattr(jaxdp, name).__doc__, name


def test_no_code_compares_the_name_of_a_data_source():
    """What differs is a field of the source's entry."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Compare):
                constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert constants.isdisjoint(SOURCES), f"{path}:{node.lineno}"


def test_no_time_is_taken_from_a_clock_that_can_be_set():
    """Intervals, deadlines and what is newest: of a monotonic clock, or of numbers.

    Not an age or the time of a TensorBoard event that is only shown, and not when obstore asks for credentials again: a read
    with old ones fails, and is repeated. When a signal arrived is known only as the time of a file; if the clock is set within
    2 s of it, a third signal still counts.
    """
    names = ("report/follow.py", "cloud/fast_reader.py", "loggers/tensorboard.py", "distributed/signal_handler.py")
    exempt = {PACKAGE / name for name in names}
    for path in sorted({*PACKAGE.rglob("*.py")} - exempt):
        found = re.search(r"\btime\.(time|time_ns|ctime)\(|\bdatetime\b|\bst_[mc]time\b", path.read_text())
        assert found is None, f"{path}: {found}"
