"""What a check has found, and how one is run so that it neither hangs nor falls."""

import subprocess
import threading
import time
from dataclasses import dataclass

from jaxdp.errors import first_line

OK, WARNING, WRONG = "ok", "warning", "wrong"
WORST_FIRST = (WRONG, WARNING, OK)
THREADS = "check: "


@dataclass(frozen=True)
class Finding:
    """One line of the report. state: ok, warning or wrong; mend: what to do, for a warning or what is wrong."""

    check: str
    state: str
    found: str
    mend: str | None = None


class Findings:
    """What one check has to say so far: the worst state counts, and everything is told in one line."""

    def __init__(self, check: str):
        self.check, self.state, self.found, self.mends = check, OK, [], []

    def ok(self, found: str) -> None:
        self.found.append(found)

    def warn(self, found: str, mend: str) -> None:
        self._worse(WARNING, found, mend)

    def wrong(self, found: str, mend: str) -> None:
        self._worse(WRONG, found, mend)

    def _worse(self, state: str, found: str, mend: str) -> None:
        self.state = min(self.state, state, key=WORST_FIRST.index)
        self.found.append(found)
        self.mends.append(mend)

    def finding(self) -> Finding:
        return Finding(self.check, self.state, "; ".join(self.found), "; ".join(self.mends) or None)


def as_dict(findings: list[Finding], recipe: str | None) -> dict:
    """The report as one JSON document."""
    rows = [{"check": one.check, "state": one.state, "found": one.found, "mend": one.mend} for one in findings]
    counts = {state: sum(one.state == state for one in findings) for state in reversed(WORST_FIRST)}
    return {"recipe": recipe, "checks": rows, **counts}


def summary(findings: list[Finding]) -> str:
    """The report in one line."""
    counts = {state: [one.check for one in findings if one.state == state] for state in WORST_FIRST}
    bad = [f"{len(names)} {state}: {', '.join(names)}" for state, names in counts.items() if state != OK and names]
    return "; ".join(bad) or "nothing is wrong"


ADVICE = ("give", "install", "leave", "mend", "name", "prepare", "put", "set", "start", "take", "unset")


def told_apart(error: str, otherwise: str) -> tuple[str, str]:
    """(what was found, how to mend it) of an error's line; `otherwise` where the line gives no advice at its end."""
    found, _, mend = error.rpartition("; ")
    return (found, mend) if found and mend.split()[0] in ADVICE else (error, otherwise)


def guarded(checks: dict, seconds: float) -> list[Finding]:
    """The findings of all checks, which run beside one another; name -> function(Findings).

    One that raises, or has not ended after so many seconds, is told of in its own line. Threads that never end stay behind: the
    caller ends the process by `os._exit` where `still_running` says so.
    """
    found: dict[str, Finding] = {}

    def look(name, check):
        findings = Findings(name)
        try:
            check(findings)
        except Exception as error:  # whatever a machine lacks
            findings.warn(f"could not be looked at: {type(error).__name__}: {first_line(error)}", "see to it by hand")
        found[name] = findings.finding()

    threads = {
        name: threading.Thread(target=look, args=(name, checks[name]), name=THREADS + name, daemon=True) for name in checks
    }
    for thread in threads.values():
        thread.start()
    end = time.monotonic() + seconds
    for name, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        late = Finding(name, WRONG, f"no answer in {seconds:g} s", "a run may hang there too; see to it by hand")
        found.setdefault(name, late)
    return [found[name] for name in checks]


def still_running() -> bool:
    """Whether a check hangs in a thread of its own."""
    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())


def output_of(command: list[str], seconds: float, **given) -> str:
    """What a command prints. Raises OSError, with the reason in one line, where it is not there, fails or does not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False, **given)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} does not answer in {seconds:g} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing said").splitlines()
        raise OSError(f"{command[0]} ends with exit code {done.returncode}: {said[-1]}")
    return done.stdout
