"""Interrupts training runs at random moments and compares their results with uninterrupted runs.

    python benchmarks/chaos.py [--runs 10] [--processes 1 2 3] [--interruptions 7] [--seed 0]

Every run is the same small training, on one process or by `jaxdp launch` on several. It is interrupted again and again, each
time a random time after a random stage (starting, compiling, stepping, evaluating, saving) begins: SIGKILL to a process, or
SIGSTOP and later SIGKILL, or SIGTERM or SIGINT, which must end it with 75. The same command resumes it until it finishes. Its
last parameters, its log without times and its accuracy must equal an uninterrupted run on as many processes. Writes
benchmarks/results/chaos.json and prints the table of interruptions. Not covered: the first tenth of a second, when Python
starts and a signal ends any program.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from common import ROOT, arguments, markdown, started, write
from helpers.processes import outcome

from jaxdp.bench.environment import provenance
from jaxdp.errors import EXIT_STOPPED
from jaxdp.run_records import RESUMING

EPOCH = 512
TRAINING = [
    *("--config", str(ROOT / "tests/helpers/tiny_run.py"), "--epochs", "24", "--mesh.cpu-devices", "2"),
    *("--data.train-examples", str(EPOCH), "--data.eval-examples", "2000"),
    *("--batch.0.global-batch", "24", "--batch.0.until-epoch", "12", "--batch.1.global-batch", "48"),
    *("--checkpoint.every-epochs", "0.78"),
]
# Latest time of an interruption in a stage, in seconds. Every session passes all stages within about an epoch.
STAGES = {"starting": 3.0, "compiling": 0.3, "stepping": 0.5, "evaluating": 0.05, "saving": 0.02}
INTERRUPTIONS = ("KILL", "STOP+KILL", "TERM", "INT")
SUSPENDED_SECONDS = 3.0  # between SIGSTOP and SIGKILL


def start(workdir: Path, processes: int) -> subprocess.Popen:
    train = ["-m", "jaxdp", "train", "--workdir", str(workdir), *TRAINING]
    if processes > 1:
        train = ["-m", "jaxdp", "launch", "--processes", str(processes), "--", "jaxdp", *train[2:]]
    return started([sys.executable, "-u", *train], workdir.with_suffix(".out"))


def members(process: subprocess.Popen, processes: int) -> list[int]:
    """The ids of the processes of a run that train; fewer while they start."""
    if processes == 1:
        return [process.pid]
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(pid) for path in children for pid in path.read_text().split()]


def handles_signals(pid: int) -> bool:
    """Whether a process has set its own handler of SIGTERM."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def has_started(process: subprocess.Popen, processes: int) -> bool:
    with contextlib.suppress(FileNotFoundError):  # a process has ended
        pids = members(process, processes)
        return len(pids) == processes and all(map(handles_signals, pids))
    return False


def last_record(log: Path) -> dict | None:
    """The last complete line of a log that another process writes."""
    if not log.exists():
        return None
    with open(log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1]) if lines else None


def stage(workdir: Path) -> str:
    """The stage of a session, judged by its output and the files of the run."""
    output = workdir.with_suffix(".out").read_text()
    if "compiling ..." not in output and RESUMING not in output:
        return "starting"
    if not re.search(r"^(\[0\] )?step \d+/", output, re.MULTILINE):  # printed for the first step of every session
        return "compiling"
    if any((workdir / "checkpoints").glob("saving-*")):
        return "saving"
    last = last_record(workdir / "metrics.jsonl")
    if last is None or "loss" not in last:
        return "stepping"
    before = last["samples"] - last["global_batch"]
    return "evaluating" if before // EPOCH < last["samples"] // EPOCH else "stepping"


def interrupt_session(workdir: Path, draw: random.Random, processes: int) -> dict:
    """Start a session and interrupt it in a random stage; returns the stage, the interruption and the exit code.

    Signals go to a random process of several, TERM and INT also to the launcher.
    """
    chosen, name = draw.choice(list(STAGES)), draw.choice(INTERRUPTIONS)
    delay, began = draw.random() * STAGES[chosen], time.monotonic()
    process = start(workdir, processes)
    while process.poll() is None and not (stage(workdir) == chosen and has_started(process, processes)):
        time.sleep(0.002)
    time.sleep(delay)
    hit_in = stage(workdir)
    with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):  # it has ended
        targets = [*members(process, processes), *([process.pid] if name in ("TERM", "INT") else [])]
        interrupt(draw.choice(targets), name)
    code, seconds = process.wait(), round(time.monotonic() - began, 1)
    expected = (0, EXIT_STOPPED) if name in ("TERM", "INT") else (0, 1, -signal.SIGKILL, 128 + signal.SIGKILL)
    if code not in expected:
        print(workdir.with_suffix(".out").read_text(), flush=True)
    return {"stage": hit_in, "signal": name, "exit": code, "as expected": code in expected, "seconds": seconds}


def interrupt(pid: int, name: str) -> None:
    for part in name.split("+"):
        os.kill(pid, signal.Signals[f"SIG{part}"])
        if part == "STOP":
            time.sleep(SUSPENDED_SECONDS)


def train_to_the_end(workdir: Path, processes: int) -> tuple:
    """Run the last session; returns what the run leaves that does not depend on time."""
    process = start(workdir, processes)
    assert process.wait() == 0, workdir.with_suffix(".out").read_text()
    return outcome(workdir)


def interrupted_run(folder: Path, number: int, *, seed: int, processes: int = 1, kills: int = 7) -> tuple[list[dict], tuple]:
    """(the interruptions of a run, its outcome)."""
    draw = random.Random(f"{seed} {number}")
    workdir = folder / f"run-{number}"
    interruptions = [interrupt_session(workdir, draw, processes) for _ in range(kills)]
    return interruptions, train_to_the_end(workdir, processes)


def table(record: dict) -> str:
    """Interruptions by stage and signal, and how many runs equal the uninterrupted one."""
    hits = [hit for hits in record["interruptions"] for hit in hits if hit["exit"] != 0]
    points = Counter((hit["stage"], hit["signal"]) for hit in hits)
    rows = [(name, *(str(points[name, signal]) for signal in INTERRUPTIONS)) for name in STAGES]
    wrong = sum(not hit["as expected"] for hit in hits)
    text = f"{len(hits)} interruptions of {record['runs']} runs on {record['processes']} processes"
    text += f"; {wrong} ended with another exit code than expected"
    text += f"; {record['equal']} runs equal the uninterrupted one bit by bit."
    return markdown(("interrupted while", *INTERRUPTIONS), rows, text)


def main():
    given = arguments(__doc__, runs=10, processes=[1, 2, 3], interruptions=7, seed=0)
    with tempfile.TemporaryDirectory() as made:
        folder, expected = Path(made), dict[int, tuple]()
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
        interruptions, different = [], []
        for number in range(given.runs):
            processes = given.processes[number % len(given.processes)]
            if processes not in expected:
                expected[processes] = train_to_the_end(folder / f"uninterrupted-{processes}", processes)
            settings = {"processes": processes, "kills": given.interruptions}
            hits, left = interrupted_run(folder, number, seed=given.seed, **settings)
            interruptions.append(hits)
            different += [number] if left != expected[processes] else []
            points = ", ".join(f"{hit['signal']} {hit['stage']} ({hit['exit']})" for hit in hits)
            print(f"run {number} on {processes}: {points}: {'DIFFERS' if number in different else 'equal'}", flush=True)
            record = {
                "provenance": provenance(("jax", "orbax-checkpoint", "numpy")),
                "seed": given.seed,
                "runs": len(interruptions),
                "processes": ", ".join(map(str, given.processes)),
                "equal": len(interruptions) - len(different),
                "different": different,
                "interruptions": interruptions,
            }
            write("chaos", record)  # after each run: they take long
    print(table(record))


if __name__ == "__main__":
    main()
