"""Results of checks, and a runner that isolates checks from one another."""

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from jaxdp.errors import first_line

OK, WARNING, ERROR = "ok", "warning", "error"
WORST_FIRST = (ERROR, WARNING, OK)
THREAD_PREFIX = "check: "


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check. status: ok, warning or error; fix: what to do about a warning or an error."""

    check: str
    status: str
    message: str
    fix: str | None = None


class ResultBuilder:
    """Collects the messages of one check; the worst status counts, and `build` joins the messages."""

    def __init__(self, check: str) -> None:
        self.check, self.status = check, OK
        self.messages: list[str] = []
        self.fixes: list[str] = []

    def ok(self, message: str) -> None:
        self.add(OK, message)

    def warning(self, message: str, fix: str) -> None:
        self.add(WARNING, message, fix)

    def error(self, message: str, fix: str) -> None:
        self.add(ERROR, message, fix)

    def add(self, status: str, message: str, fix: str = "") -> None:
        """Add a message. fix: unused if the status is ok."""
        self.status = min(self.status, status, key=WORST_FIRST.index)
        self.messages.append(message)
        if status != OK:
            self.fixes.append(fix)

    def build(self) -> CheckResult:
        return CheckResult(self.check, self.status, "; ".join(self.messages), "; ".join(dict.fromkeys(self.fixes)) or None)


Check = Callable[[ResultBuilder], None]


def to_dict(results: list[CheckResult], recipe: str) -> dict:
    """The report as one JSON document: {"recipe", "checks": [...]} and the number of results by status."""
    counts = {status: sum(result.status == status for result in results) for status in reversed(WORST_FIRST)}
    return {"recipe": recipe, "checks": [asdict(result) for result in results], **counts}


def summarize(results: list[CheckResult]) -> str:
    """The names of the checks with errors and warnings, in one line."""
    lines = []
    for status in (ERROR, WARNING):
        if checks := [result.check for result in results if result.status == status]:
            lines.append(f"{len(checks)} {status}{'s' * (len(checks) > 1)}: {', '.join(checks)}")
    return "; ".join(lines) or "no problems found"


def run_concurrently(checks: dict[str, Check], timeout_seconds: float) -> list[CheckResult]:
    """Run every check in a thread and return the results in the order of `checks`, a dict from name to function.

    A check that raises gets a warning; one that does not return within `timeout_seconds` gets an error, and its thread is left
    running: the caller must end the process by `os._exit` if `any_running()`.
    """
    results: dict[str, CheckResult] = {}

    def run(name: str) -> None:
        builder = ResultBuilder(name)
        try:
            checks[name](builder)
        except Exception as error:  # depends on the machine
            builder.warning(f"check failed: {type(error).__name__}: {first_line(error)}", "check this manually")
        results[name] = builder.build()

    threads = {name: threading.Thread(target=run, args=(name,), name=THREAD_PREFIX + name, daemon=True) for name in checks}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + timeout_seconds
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        timed_out = CheckResult(name, ERROR, f"no answer in {timeout_seconds:g} s", "check this manually: a run may hang too")
        results.setdefault(name, timed_out)
    return [results[name] for name in checks]


def any_running() -> bool:
    """Whether the thread of a check that timed out is still running."""
    return any(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate())


def output_of(command: list[str], timeout_seconds: float, *, stdin: str | None = None) -> str:
    """The stdout of a command. Raises OSError with a one-line reason if it is missing, fails or times out."""
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]}: no answer in {timeout_seconds:g} s") from None
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise OSError(f"{command[0]} failed with exit code {done.returncode}: {output[-1]}")
    return done.stdout
