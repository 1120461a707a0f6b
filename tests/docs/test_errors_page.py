"""docs/errors.md has every error message of jaxdp, and none that jaxdp does not print."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/errors.md").read_text()
TREES = {  # without jaxdp/doctor, which prints a fix beside each error
    path: ast.parse(path.read_text()) for path in sorted((ROOT / "jaxdp").rglob("*.py")) if path.parent.name != "doctor"
}
# Name of a function or exception -> position of the message among its arguments; others have `reason=`.
MESSAGE_AT = dict.fromkeys(
    [
        "TrainingError",
        "CallbackError",
        "DataError",
        "UnreadableCheckpoint",
        "ImageError",
        "CorruptCheckpoint",
        "CheckpointMismatch",
        "_InvalidWeights",
        "error",
        "AuditFailed",
        "Stopped",
        "ForcedStop",
        "UnusableModule",
        "Rejected",
    ],
    0,
) | dict.fromkeys(["_error", "damaged", "_refused", "_read_error", "_foreign_file"], 1)
# Exceptions that a user does not see: bugs of the caller, or turned into one of the errors above.
NOT_SHOWN = {
    "ValueError",
    "TypeError",
    "IndexError",
    "RuntimeError",
    "AttributeError",
    "OSError",
    "EOFError",
    "TimeoutError",
    "ConnectionError",
    "NotRegularError",
    "StopTraining",
    "StorageError",  # its reason is that of an error above
    "LeaseHeld",
    "LeaseLost",
    "Unavailable",  # tried again
    "UnknownFormatError",
    "InterruptedError",
    "BlockingIOError",
}


def normal(message: str) -> str:
    """A message with one form of placeholders and without the backticks of commands."""
    return re.sub(r"\s+", " ", re.sub(r"\.{3,}", "...", message.replace("`", "")))


def texts(node: ast.expr, function: ast.AST) -> set[str]:
    """The values of an expression, with ... for what is not literal. function: where names are assigned."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.JoinedStr):
        return {"".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)}
    if isinstance(node, ast.IfExp):
        return texts(node.body, function) | texts(node.orelse, function)
    if isinstance(node, ast.BoolOp):
        return set().union(*(texts(value, function) for value in node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return {left + right for left in texts(node.left, function) for right in texts(node.right, function)}
    if isinstance(node, ast.Name):
        return assigned(node.id, function) or {"..."}
    return {"..."}


def assigned(name: str, function: ast.AST) -> set[str]:
    """The texts that a function assigns to a name, also in a tuple."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if tuples else [(target, value)]
            for one, given in pairs:
                if isinstance(one, ast.Name) and one.id == name and not (isinstance(given, ast.Name) and given.id == name):
                    found |= texts(given, function)
    return found


def calls(node: ast.AST, function: ast.AST):
    """(call, its function's name, the function that contains it) of every call in a tree."""
    for child in ast.iter_child_nodes(node):
        inner = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call):
            yield child, ast.unparse(child.func).rpartition(".")[2], inner
        yield from calls(child, inner)


@functools.cache
def messages_in_code() -> frozenset[str]:
    found = set()
    for tree in TREES.values():
        for call, name, function in calls(tree, tree):
            reasons = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
            if name in MESSAGE_AT and len(call.args) > MESSAGE_AT[name]:
                reasons.append(call.args[MESSAGE_AT[name]])
            if name not in ("partial", "_record"):  # copies of an exception; hung processes
                found |= {normal(text) for reason in reasons for text in texts(reason, function)}
    return frozenset(message for message in found if re.search(r"\w", message))


def sections() -> dict[str, list[str]]:
    """Messages by heading: the code in the first cells of tables."""
    parts = re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)[1:]
    cells = (re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE) for text in parts[1::2])
    return {
        head: [normal(message) for cell in found for message in re.findall("`([^`]+)`", cell)]
        for head, found in zip(parts[::2], cells, strict=True)
    }


FOREIGN = "Messages of JAX, CUDA, NCCL and the system"


def test_every_message_is_on_the_page():
    documented = {message for messages in sections().values() for message in messages}
    missing = messages_in_code() - documented
    assert not missing, f"add to docs/errors.md, with their fix: {sorted(missing)}"


def test_page_has_no_message_that_the_code_lacks():
    known = messages_in_code()
    constants = (node.value for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Constant))
    literals = normal("\n".join(value for value in constants if isinstance(value, str)))
    stale = [
        message
        for head, messages in sections().items()
        for message in messages
        if head != FOREIGN and message not in known and not all(part.strip() in literals for part in message.split("..."))
    ]
    assert not stale


def test_every_message_is_listed_once():
    messages = [message for found in sections().values() for message in found]
    assert len(messages) > 200
    assert len(messages) == len(set(messages))


def test_every_raised_exception_is_collected_or_not_shown():
    """A new kind of error must be entered in one of the tables above."""
    helpers = {"ConfigError", "NotPreparedError", "one_of", "_unknown"}  # with `reason=`
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name = ast.unparse(node.exc.func).rpartition(".")[2]
                literal = isinstance(node.exc.args[0], ast.Constant | ast.JoinedStr)
                assert not literal or name in helpers | MESSAGE_AT.keys() | NOT_SHOWN, name
