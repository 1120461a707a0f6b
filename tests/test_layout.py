"""What the code base promises about itself."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from jaxdp.cli import COMMANDS

PACKAGE = Path(__file__).parent.parent / "jaxdp"
# Each may import those before it, never those after.
LAYERS = [
    {"errors"},
    {"commands", "config", "parallel.alone", "parallel.memory", "parallel.stragglers"},
    {"files", "flags"},
    {"registry"},
    {"validation", "parallel.cluster", "parallel.compilation", "parallel.team_server", "launch", "training.stop"},
    {"parallel.team"},
    {"recipes"},
    {"arguments"},
    {"schedules", "losses", "parallel.mesh", "parallel.distributed", "models.convolution", "models.normalization", "optim.lars"}
    | {"parallel.buckets", "parallel.chips", "parallel.hlo", "parallel.wire"}
    | {
        "data.order",
        "data.groups",
        "data.augment",
        "training.picture",
        "training.tensorboard",
        "training.loss_scale",
        "training.watchdog",
        "training.digest",
    },
    {"data.decode"},
    {"data.folder", "data.prepared", "data.loader"},
    {"models.resnet", "models.own", "parallel.allreduce", "parallel.cost_model", "optim.build", "data.sources"}
    | {"training.metrics", "training.console"},
    {"training.workdir", "training.result", "training.notebook"},
    {"models", "optim", "data.feed", "planning", "parallel.measure", "parallel.overlap", "bench.provenance"}
    | {"models.torch_weights"},
    {"training.state", "training.guard", "training.agreement", "prediction", "bench.ceilings", "bench.kernels"}
    | {"models.weights"},
    {"training.step", "training.evaluation", "training.strategy", "training.prepared", "training.seal", "training.remarks"}
    | {"training.finetuning", "training.profile", "bench.allreduce", "bench.input"},
    {"training.checkpoint", "training.programs", "training.log", "bench.stepper"},
    {"bench.scaling", "bench.step"},
    {"training.loop", "training.restored", "training.first_gradient", "report.reached", "aot"},
    {"report.history"},
    {"report.communication"},
    {"report.curves"},
    {"report.classes"},
    {"report.tables"},
    {"report.page"},
    {"report"},
    {"training.session", "training.predicting", "doctor.finding"},
    {"doctor.packages"},
    {"doctor.bare", "doctor.software", "doctor.machine", "doctor.network", "doctor.images", "doctor.probe"},
    {"doctor.checks", "doctor.proof"},
    {"doctor.gradients"},
    {"doctor.resuming"},
    {"doctor.verify"},
    {f"commands.{name}" for name in COMMANDS},
    {"cli"},
    {"__main__"},
]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """Modules of jaxdp that a file imports at its top level, and private ones of JAX anywhere."""
    names = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.ImportFrom) and node.module:
            found = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        top = node in tree.body
        names |= {name for name in found if name.startswith("jax._src") or (top and name.startswith("jaxdp."))}
    return names


def test_imports_point_one_way():
    level = {name: height for height, names in enumerate(LAYERS) for name in names}
    empty = {"", "bench", "data", "doctor", "parallel", "training"}
    for path in PACKAGE.rglob("*.py"):
        name = module_name(path)
        if name in empty:
            continue
        assert name in level, f"{name} has no layer: give it one in LAYERS"
        for other in imported(path):
            other = other.removeprefix("jaxdp.")
            if other in level and other != name:
                assert level[other] < level[name], f"{name} imports {other}"


def test_nothing_private_of_jax_is_imported():
    for path in PACKAGE.rglob("*.py"):
        assert not {name for name in imported(path) if name.startswith("jax._src")}, path


def test_only_the_model_imports_flax():
    for path in PACKAGE.rglob("*.py"):
        if re.search(r"^\s*(import|from) flax", path.read_text(), re.MULTILINE):
            assert path.parent.name == "models", path


def test_importing_jaxdp_starts_nothing():
    code = "import jaxdp, sys; print([m for m in ('jax', 'flax', 'matplotlib', 'sklearn') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_every_public_name_is_there():
    import jaxdp

    for name in jaxdp.__all__:
        assert getattr(jaxdp, name).__doc__, name
