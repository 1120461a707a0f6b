"""Wall and CPU seconds of starting: imports, `jaxdp plan`, and the first step of the default run.

    python benchmarks/startup.py [--rounds 5] [CHECKOUT ...]

Runs alternately in every checkout (default: this one), on the CPU. Writes medians to benchmarks/results/startup.json and prints
a table.
"""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from common import ROOT, alternate, arguments, commit_of, made_on, markdown, write

from jaxdp.bench.environment import provenance

FIRST_STEP = """
import os
import sys

import jaxdp


class Leave(jaxdp.Callback):
    def after_step(self, run, metrics):
        os._exit(0)


jaxdp.train(jaxdp.load_config("digits"), sys.argv[1], resume="never", callbacks=[Leave()])
"""


def seconds(checkout: Path, words: list[str], cache: Path) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of a Python command."""
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(checkout), "JAX_COMPILATION_CACHE_DIR": str(cache)}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # the first round writes what an installation has
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, *words], cwd=checkout, env=os.environ | environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(words)[:100]} failed in {checkout}")
    return time.monotonic() - began, used.ru_utime + used.ru_stime


def measure(checkout: Path) -> dict[str, tuple[float, float]]:
    """(wall seconds, CPU seconds) by name. The first step fills the cache that the second uses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = {
            "import jaxdp.session": ["-c", "import jaxdp.session.train"],
            "jaxdp plan": ["-m", "jaxdp", "plan"],
            "first step, empty cache": ["-c", FIRST_STEP, str(folder / "first")],
            "first step, filled cache": ["-c", FIRST_STEP, str(folder / "second")],
        }
        return {name: seconds(checkout, words, folder / "cache") for name, words in commands.items()}


def table(record: dict) -> str:
    checkouts = record["results"]
    rows = [
        (name, *(f"{wall:.1f} s ({cpu:.1f} s)" for wall, cpu in (one["wall_and_cpu_seconds"][name] for one in checkouts)))
        for name in checkouts[0]["wall_and_cpu_seconds"]
    ]
    return markdown(
        ("", *(one["checkout"] for one in checkouts)),
        rows,
        f"Wall (CPU) seconds, medians of {checkouts[0]['rounds']} rounds, by commit. By `benchmarks/startup.py` on "
        f"{made_on(record)}.",
    )


def main():
    given = arguments(__doc__, checkouts=(ROOT,), rounds=5)
    rounds = alternate({checkout: partial(measure, checkout.resolve()) for checkout in given.checkouts}, given.rounds)
    results = []
    for checkout, done in rounds.items():
        medians = {name: [median(each[name][part] for each in done) for part in (0, 1)] for name in done[0]}
        results.append({"checkout": commit_of(checkout), "wall_and_cpu_seconds": medians, "rounds": len(done)})
    write("startup", {"results": results, "provenance": provenance()}, table)


if __name__ == "__main__":
    main()
