"""Share of small faults in the code that the near tests find.

    python benchmarks/mutations.py [--seed 1] [--count 100] [--only FOLDER ...]

Draws mutations from the syntax trees of the first three rings of docs/tour.md (`core`: the modules of the first): a module by
its lines, a kind and a place evenly. Applies each to a clone of the commit and runs the module's near tests, without slow ones.
Writes benchmarks/results/mutations.json after each mutation; continues it if code, tests, seed and folders are the same.
"""

import ast
import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from common import ROOT, arguments, commit_of, markdown, read, write
from test_layout import RINGS, folder_of, module_of

from jaxdp.bench.environment import provenance

LIMIT = 600  # seconds; a mutation with which the near tests take longer is found
FOLDERS = [name for ring in [*RINGS.values()][:3] for line in ring for name in line.split()]
# (module, line, change) of a survivor that is no fault, in the commit of the record -> why
NO_FAULT = {
    (
        "jaxdp/parallel/collectives.py",
        "by_position = np.moveaxis(mesh, axes, range(len(axes))).reshape(positions, -1)",
        "1 -> 2",
    ): "NumPy takes any negative size for the rest",
    (
        "jaxdp/distributed/runtime.py",
        'if available[0].platform == "cpu":',
        "0 -> -1",
    ): "all devices of a process are of one platform",
    (
        "jaxdp/models/folded_batch_norm.py",
        "precision = lax.Precision.HIGHEST if images.dtype == jnp.float32 else None",
        "images.dtype == jnp.float32 -> images.dtype != jnp.float32",
    ): "only CPUs take this form, and their products do not depend on the precision",
    (
        "jaxdp/flags.py",
        "self.groups[section] = type(default[0])",
        "0 -> -1",
    ): "all items of a field are of one class",
    (
        "jaxdp/models/bn_relu.py",
        "total: jax.Array | float = 0.0 if shortcut is None else shortcut.astype(jnp.float32)",
        "shortcut.astype(jnp.float32) -> shortcut",
    ): "the sum with a term in float32 is the same",
}
MESSAGES = re.compile(r"\w*Error|\w*Exit|warn|print|dataclass")  # calls whose arguments are messages or declarations
MESH_AXES = {"HORIZONTAL": "VERTICAL", "VERTICAL": "HORIZONTAL", "AXES": "HORIZONTAL"}
PAIRS = (
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.LShift, ast.RShift), (ast.And, ast.Or)),
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
)
OTHER = {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult} | dict(PAIRS) | {b: a for a, b in PAIRS}


class Change(NamedTuple):
    """A node of a syntax tree, and what replaces it."""

    kind: str
    old: ast.expr | ast.stmt
    new: ast.expr | ast.stmt

    def __str__(self) -> str:
        return f"{ast.unparse(self.old)} -> {ast.unparse(self.new)}"


def acting(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, without annotations, messages, and declarations such as @dataclass(frozen=True)."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if field not in ("annotation", "returns") and isinstance(child, ast.AST) and not is_message(child):
                yield child
                yield from acting(child)


def is_message(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return MESSAGES.fullmatch(ast.unparse(node.func).split(".")[-1]) is not None
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.Raise | ast.JoinedStr)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def without_call(call: ast.Call, imported: set[str]) -> ast.expr | None:
    """The object of a method, the first argument of a function."""
    if isinstance(call.func, ast.Attribute) and not is_text(owner := call.func.value):
        name = re.fullmatch(r"(\w+)[\w.]*", ast.unparse(owner))
        if not name or (name[1] not in imported and name[0] not in ("self", "cls")):
            return owner
    return call.args[0] if call.args and not isinstance(call.args[0], ast.Starred) else None


def changes(tree: ast.Module) -> Iterator[Change]:
    """Every change of a module that may be drawn."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    statements = set()
    for node in acting(tree):
        match node:
            case ast.BinOp(left, op, right) if type(op) in OTHER and not is_text(left) and not is_text(right):
                yield Change("operator", node, ast.BinOp(left, OTHER[type(op)](), right))
            case ast.BoolOp(op, values):
                yield Change("operator", node, ast.BoolOp(OTHER[type(op)](), values))
            case ast.AugAssign(target, op, value) if type(op) in OTHER and not is_text(value):
                yield Change("operator", node, ast.AugAssign(target, OTHER[type(op)](), value))
            case ast.UnaryOp(_, operand):
                yield Change("operator", node, operand)
            case ast.Compare(left, [op], right):
                yield Change("comparison", node, ast.Compare(left, [OTHER[type(op)]()], right))
            case ast.Constant(bool(value)):
                yield Change("constant", node, ast.Constant(not value))
            case ast.Constant(int(value)):
                yield from (Change("constant", node, ast.Constant(other)) for other in (value + 1, value - 1))
            case ast.Constant(float(value)):
                yield Change("constant", node, ast.Constant(2 * value or 1.0))
            case ast.keyword("axis" | "axes", ast.Tuple([*first, _]) as axes) if first:
                yield Change("axis", axes, ast.Tuple(first, ast.Load()))
            case ast.keyword("axis" | "axes", index) | ast.Subscript(ast.Attribute(attr="shape"), index) if re.fullmatch(
                r"-?\d+", number := ast.unparse(index)
            ):
                yield Change("axis", index, ast.Constant(1 if number == "0" else 0))
            case ast.Name(name, ast.Load()) if name in MESH_AXES:
                yield Change("axis", node, ast.Name(MESH_AXES[name], ast.Load()))
            case ast.Expr(ast.Call() as call) if not is_message(call):
                statements.add(call)
                yield Change("dropped call", node, ast.Pass())
            case ast.Call() if node not in statements and (rest := without_call(node, imported)):
                yield Change("dropped call", node, rest)


def changed(text: str, change: Change) -> str:
    """The text of a module with one change. Columns of a syntax tree count bytes."""
    data, old = text.encode(), change.old
    starts = [0, *(newline.end() for newline in re.finditer(b"\n", data))]
    begin, end = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
    new = ast.unparse(change.new)
    return (data[:begin] + (new if isinstance(change.new, ast.stmt) else f"({new})").encode() + data[end:]).decode()


def meaning(code: CodeType) -> tuple:
    """What a program does, wherever its lines are."""
    constants = (meaning(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts)
    return code.co_code, code.co_names, *constants


@functools.cache
def changes_of(path: Path) -> dict[str, list[Change]]:
    """By kind."""
    by_kind: dict[str, list[Change]] = {}
    for change in changes(ast.parse(path.read_text())):
        by_kind.setdefault(change.kind, []).append(change)
    return by_kind


def draw(seed: int, folders: list[str]) -> Iterator[tuple[Path, Change]]:
    """Changes without end, none twice, that compile to another program."""
    modules = sorted((ROOT / "jaxdp").rglob("*.py"))
    paths = [path for path in modules if folder_of(module_of(path)) in folders and changes_of(path)]
    lines = [path.read_text().count("\n") for path in paths]
    chance, drawn = random.Random(seed), set()
    while True:
        (path,) = chance.choices(paths, lines)
        by_kind, text = changes_of(path), path.read_text()
        change = chance.choice(by_kind[chance.choice([*by_kind])])
        new = changed(text, change)
        try:
            same = meaning(compile(new, "", "exec")) == meaning(compile(text, "", "exec"))
        except SyntaxError:
            continue
        if not same and new not in drawn:
            drawn.add(new)
            yield path, change


def near_tests(path: Path) -> list[str]:
    """test_MODULE*.py, and what else names the module in its folder of tests; without any, all that name it, or the folder."""
    parent, _, name = (module := module_of(path)).rpartition(".")
    names_it = re.compile(rf"{re.escape(module)}\b(?!\.)|from {re.escape(parent)} import (\([^)]*|.*)\b{name}\b")
    folder = ROOT / "tests" / path.relative_to(ROOT / "jaxdp").parent
    naming = [test for test in sorted((ROOT / "tests").rglob("test_*.py")) if names_it.search(test.read_text())]
    beside = [*sorted(folder.glob(f"test_{name}*.py")), *(test for test in naming if test.parent == folder)]
    return [str(test.relative_to(ROOT)) for test in dict.fromkeys(beside or naming or sorted(folder.glob("test_*.py")))]


def first_failure(checkout: Path, tests: list[str]) -> str | None:
    """The test that fails, without its parameters; "time limit"; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    variables = os.environ | {"PYTHONPATH": str(checkout), "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache/xla")}
    with tempfile.TemporaryFile("w+") as out:
        run = subprocess.Popen(command, cwd=checkout, env=variables, stdout=out, stderr=out, start_new_session=True)
        try:
            code = run.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return "time limit"
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)  # with the processes that a test has started
                run.wait()
        out.seek(0)
        text = out.read()
    if code in (0, 5):  # 5: there is no test
        return None
    return next(iter(re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", text, re.MULTILINE)), text[-200:])


def tried(path: Path, change: Change, checkout: Path) -> dict:
    """The row of a mutation. Stops if what found it fails without it too."""
    copy, text, began = checkout / path.relative_to(ROOT), path.read_text(), time.monotonic()
    copy.write_text(changed(text, change))
    by = first_failure(checkout, tests := near_tests(path))
    seconds = round(time.monotonic() - began)
    copy.write_text(text)
    if by and (other := first_failure(checkout, [by] if "::" in by else tests)):
        raise SystemExit(f"{path}: {other} without a mutation")
    line = text.splitlines()[change.old.lineno - 1].strip()
    place = {
        "part": folder_of(module_of(path)),
        "module": str(path.relative_to(ROOT)),
        "line": line,
        "change": str(change),
    }
    return place | {"kind": change.kind, "found": by is not None, "by": by, "seconds": seconds}


def table(record: dict) -> str:
    drawn, found, equal = Counter(), Counter(), Counter()
    for row in record["rows"]:
        for part in (row["part"], "all"):
            drawn[part] += 1
            found[part] += row["found"]
            equal[part] += bool(row["no_fault"])
    rows = [(part, *(str(count[part]) for count in (drawn, found, equal))) for part in (*FOLDERS, "all") if drawn[part]]
    return markdown(("part", "mutations", "found by near tests", "no fault"), rows, f"Seed {record['seed']}.")


def main() -> None:
    given = arguments(__doc__, seed=1, count=100, only=FOLDERS)
    subprocess.run(["git", "diff", "--exit-code", "HEAD", "--", "jaxdp", "tests"], cwd=ROOT, check=True)  # what is cloned
    source = {part: commit_of(ROOT, f"HEAD:{part}") for part in ("jaxdp", "tests")} | {"seed": given.seed, "only": given.only}
    record = read("mutations", {})
    if any(record.get(key) != value for key, value in source.items()):
        record = source | {"provenance": provenance(), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
        for number, (path, change) in zip(range(given.count), draw(given.seed, given.only), strict=False):
            if number >= len(record["rows"]):
                record["rows"].append(tried(path, change, Path(folder)))
                write("mutations", record)
                print(record["rows"][-1], flush=True)
    for row in record["rows"]:
        row["no_fault"] = None if row["found"] else NO_FAULT.get((row["module"], row["line"], row["change"]))
    write("mutations", record, table)
    print(*(row for row in record["rows"] if not row["found"] and not row["no_fault"]), sep="\n")


if __name__ == "__main__":
    main()
