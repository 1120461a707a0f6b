"""The error messages of jaxdp, read from its source: the text of the manual's page of errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "jaxdp"
# Exceptions and helpers with a message as positional argument -> its position. A hint, if any, is the next argument.
MESSAGE_AT = dict.fromkeys(
    [
        "AuditFailed",
        "CallbackError",
        "CheckpointMismatch",
        "CorruptCheckpoint",
        "DataError",
        "ForcedStop",
        "ImageError",
        "Rejected",
        "Stopped",
        "TrainingError",
        "UnreadableCheckpoint",
        "Unusable",
        "error",
    ],
    0,
) | dict.fromkeys(["_error", "damaged"], 1)
HEADINGS = {  # of the page -> folders of the package; the modules at its top come first
    "Configuration and command line": ["jaxdp", "cli"],
    "Data": ["data"],
    "Models and optimizers": ["models", "optim"],
    "Devices and processes": ["distributed", "parallel", "xla"],
    "Runs and checkpoints": ["session", "setup", "training", "tasks", "callbacks", "checkpoint", "loggers"],
    "Object storage": ["cloud"],
    "Other commands": ["inference", "report", "bench", "analysis"],
}


class Message(NamedTuple):
    """An error that the code can print. Literal text, with ... for computed parts."""

    place: str  # file and line
    exception: str  # the exception, or the helper that makes it
    field: str
    reason: str
    fix: str


def messages(folder: str) -> Iterator[Message]:
    """The messages of the modules in a folder of the package, once for each text."""
    within = PACKAGE if folder == "jaxdp" else PACKAGE / folder
    for path in sorted(within.glob("*.py")):
        tree = ast.parse(path.read_text())
        for call, function in _calls(tree, tree):
            name = ast.unparse(call.func).rpartition(".")[2]
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            at = MESSAGE_AT.get(name)
            positional = at is not None and len(call.args) > at
            reason = call.args[at] if positional else given.get("reason")
            if reason is None:
                continue
            hint = call.args[at + 1] if positional and len(call.args) > at + 1 else given.get("hint")
            named = call.args and not positional and isinstance(call.args[0], ast.Constant)
            field = str(call.args[0].value) if named else ""
            fixes = sorted(_texts(hint, function) - {"", "..."}) if hint else []
            fix = " / ".join(fixes) or ("..." if hint else "")
            place = f"{path.relative_to(PACKAGE.parent)}:{call.lineno}"
            for text in sorted(_texts(reason, function)):
                if re.search(r"\w", text):
                    yield Message(place, name, field, _plain(text), _plain(fix))


def errors() -> str:
    """The page of errors: a table of messages and fixes for each part of the package."""
    parts = [
        "# Error messages\n",
        "jaxdp prints an error in one line, `jaxdp: FIELD=VALUE: REASON; FIX`, without a traceback, and exits with",
        "[a code](usage.md#exit-codes). This list is made from the source; `...` replaces names, numbers and paths. A",
        "traceback is a bug of jaxdp, unless it ends in your own code. Messages of JAX, CUDA and NCCL are among the",
        "[questions](faq.md#error-messages).\n",
    ]
    for heading, folders in HEADINGS.items():
        found = [message for folder in folders for message in messages(folder)]
        rows = dict.fromkeys(f"| {_code(_with_field(each))} | {_code(each.fix)} |" for each in found)
        parts += [f"## {heading}\n\n| message | fix |\n|---|---|", *rows, ""]
    return "\n".join(parts)


def _with_field(message: Message) -> str:
    return f"{message.field}: {message.reason}" if message.field else message.reason


def _code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|") if text else ""


def _plain(text: str) -> str:
    """A text in one line, with one form of placeholders and without the backticks of commands."""
    return re.sub(r"\s+", " ", re.sub(r"\.{3,}", "...", text.replace("`", ""))).strip()


def _texts(node: ast.expr, function: ast.AST) -> set[str]:
    """The values of an expression, with ... for what is not literal. function: where its names are assigned."""

    def inner(part: ast.expr) -> set[str]:
        return _texts(part, function)

    match node:
        case ast.Constant(value=str()):
            return {node.value}
        case ast.JoinedStr():
            return {"".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)}
        case ast.IfExp():
            return inner(node.body) | inner(node.orelse)
        case ast.BoolOp():
            return set().union(*map(inner, node.values))
        case ast.BinOp(op=ast.Add()):
            return {left + right for left in inner(node.left) for right in inner(node.right)}
        case ast.Name():
            return set().union(*map(inner, _assigned(node.id, function, before=node.lineno))) or {"..."}
    return {"..."}


def _assigned(name: str, function: ast.AST, *, before: int) -> list[ast.expr]:
    """The expressions last assigned to a name before a line, also in a tuple: several if a statement above has branches."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and node.end_lineno < before:
            target, value = node.targets[0], node.value
            tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if tuples else [(target, value)]
            found += [given for one, given in pairs if isinstance(one, ast.Name) and one.id == name]
    last = max((given.lineno for given in found), default=0)
    branches = [node for node in ast.walk(function) if isinstance(node, ast.If | ast.Try | ast.Match)]
    passed = [node.lineno for node in branches if node.lineno <= last <= node.end_lineno < before]
    return [given for given in found if given.lineno >= min(passed, default=last)]


def _calls(node: ast.AST, function: ast.AST) -> Iterator[tuple[ast.Call, ast.AST]]:
    """(call, the function that contains it) of every call in a tree."""
    for child in ast.iter_child_nodes(node):
        inner = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call):
            yield child, inner
        yield from _calls(child, inner)
