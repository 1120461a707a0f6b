"""Interrupts training runs at random moments and compares their results with those of uninterrupted runs.

    python benchmarks/chaos.py [--runs 10] [--processes 1 2 3] [--interruptions 7] [--seed 0]

Every run is the same small training, on one process or by `jaxdp launch` on several. It is interrupted one to five times, or
as often as asked, each time a random time after a random stage (starting, compiling, stepping, evaluating, saving) begins:
SIGKILL to a process, SIGSTOP and later SIGKILL, or SIGTERM or SIGINT, which must end it with 75. The same command resumes it
until it finishes. Its last parameters, its log without times and its accuracy must equal those of an uninterrupted run on as
many processes. Writes benchmarks/results/chaos.json and prints the table of interruptions.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from jaxdp.bench.environment import provenance
from jaxdp.checkpoint.listing import latest_valid
from jaxdp.errors import EXIT_STOPPED
from jaxdp.records import TIMING, read_log

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/chaos.json"
TRAINING = [
    *("--data.source", "synthetic", "--data.image-size", "8", "--data.train-examples", "256", "--data.eval-examples", "2000"),
    *("--model.depth", "18", "--model.width", "2", "--model.stem", "small", "--mesh.cpu-devices", "2", "--epochs", "8"),
    *("--batch.0.global-batch", "12", "--batch.0.until-epoch", "4", "--batch.1.global-batch", "24"),
    *(
        "--evaluation.batch",
        "250",
        "--checkpoint.every-epochs",
        "0.78",
        "--logging.no-tensorboard",
        "--logging.every-steps",
        "1",
    ),
]
EPOCH = 256
STAGES = ("starting", "compiling", "stepping", "evaluating", "saving")
INTERRUPTIONS = ("KILL", "STOP+KILL", "TERM", "INT")
SUSPENDED_SECONDS = 3.0  # between SIGSTOP and SIGKILL


def start(workdir: Path, processes: int) -> subprocess.Popen:
    train = ["-m", "jaxdp", "train", "--workdir", str(workdir), *TRAINING]
    if processes > 1:
        train = ["-m", "jaxdp", "launch", "--processes", str(processes), "--", "jaxdp", *train[2:]]
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    with open(workdir.with_suffix(".out"), "w") as out:
        return subprocess.Popen([sys.executable, "-u", *train], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)


def members(process: subprocess.Popen, processes: int) -> list[int]:
    """The ids of the processes of a run that train; fewer while they start."""
    if processes == 1:
        return [process.pid]
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(pid) for path in children for pid in path.read_text().split()]


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
    """The stage of a run, judged by its files."""
    if "compiling ..." in (output := workdir.with_suffix(".out").read_text()) or "resuming from" in output:
        last = last_record(workdir / "metrics.jsonl")
        if any((workdir / "checkpoints").glob("saving-*")):
            return "saving"
        if last is None:
            return "compiling"
        before = last["samples"] - last.get("global_batch", 0)
        due = "loss" in last and before // EPOCH < last["samples"] // EPOCH
        return "evaluating" if due else "stepping"
    return "starting"


def interrupt_session(workdir: Path, draw: random.Random, processes: int) -> dict:
    """Start a session and interrupt it in a random stage; returns the stage, the interruption and the exit code.

    The session may finish before. Signals go to a random process of several, TERM and INT also to the launcher.
    """
    chosen, name, delay = draw.choice(STAGES), draw.choice(INTERRUPTIONS), draw.random() ** 2 * 0.5
    process = start(workdir, processes)
    while process.poll() is None and (stage(workdir) != chosen or len(members(process, processes)) < processes):
        time.sleep(0.002)
    time.sleep(delay)
    hit_in = stage(workdir)
    with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):  # it has ended
        targets = [*members(process, processes), *([process.pid] if name in ("TERM", "INT") else [])]
        interrupt(draw.choice(targets), name)
    code = process.wait()
    ended = (0, EXIT_STOPPED) if name in ("TERM", "INT") else (0, 1, -signal.SIGKILL, 128 + signal.SIGKILL)
    if hit_in == "starting" and name in ("TERM", "INT"):  # Python may not have come to the handler yet
        number = signal.Signals[f"SIG{name}"]
        ended += (-number, 128 + number, 1)
    assert code in ended, (code, name, chosen, hit_in, workdir.with_suffix(".out").read_text())
    return {"stage": hit_in, "signal": name, "exit": code}


def interrupt(pid: int, name: str) -> None:
    for part in name.split("+"):
        os.kill(pid, signal.Signals[f"SIG{part}"])
        if part == "STOP":
            time.sleep(SUSPENDED_SECONDS)


def train_to_the_end(workdir: Path, processes: int) -> dict:
    """Run the last session; returns what the run leaves that does not depend on time."""
    process = start(workdir, processes)
    assert process.wait() == 0, workdir.with_suffix(".out").read_text()
    result = json.loads((workdir / "result.json").read_text())
    log = [{name: value for name, value in line.items() if name not in TIMING} for line in read_log(workdir / "metrics.jsonl")]
    last = latest_valid(workdir / "checkpoints")
    return {"arrays": last.arrays, "log": log, "accuracy": result["accuracy"], "loss": result["loss"], "steps": result["steps"]}


def interrupted_run(
    folder: Path, number: int, *, seed: int, processes: int = 1, kills: int | None = None
) -> tuple[list[dict], dict]:
    """(the interruptions of a run, its outcome)."""
    draw = random.Random(f"{seed} {number}")
    workdir = folder / f"run-{number}"
    interruptions = [interrupt_session(workdir, draw, processes) for _ in range(kills or draw.randint(1, 5))]
    return interruptions, train_to_the_end(workdir, processes)


def table(record: dict) -> str:
    """Interruptions by stage and signal, and how many runs equal the uninterrupted one."""
    header = " | ".join(("interrupted while", *INTERRUPTIONS))
    lines = [f"| {header} |", "|---" * (1 + len(INTERRUPTIONS)) + "|"]
    hits = [hit for hits in record["interruptions"] for hit in hits if hit["exit"] != 0]
    points = Counter((hit["stage"], hit["signal"]) for hit in hits)
    lines += [f"| {name} | {' | '.join(str(points[name, signal]) for signal in INTERRUPTIONS)} |" for name in STAGES]
    text = f"{len(hits)} interruptions of {record['runs']} runs on {record['processes']} processes"
    return "\n".join([*lines, "", f"{text}; {record['equal']} runs equal the uninterrupted one bit by bit."])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 2, 3], help="of the runs, in turn")
    parser.add_argument("--interruptions", type=int, help="of each run (default: a random number from 1 to 5)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder, expected = Path(made), dict[int, dict]()
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
        interruptions, different = [], []
        for number in range(arguments.runs):
            processes = arguments.processes[number % len(arguments.processes)]
            if processes not in expected:
                expected[processes] = train_to_the_end(folder / f"uninterrupted-{processes}", processes)
            options = {"seed": arguments.seed, "processes": processes, "kills": arguments.interruptions}
            hits, outcome = interrupted_run(folder, number, **options)
            interruptions.append(hits)
            if outcome != expected[processes]:
                different.append(number)
            points = ", ".join(f"{hit['signal']} {hit['stage']} ({hit['exit']})" for hit in hits)
            is_equal = "DIFFERS" if outcome != expected[processes] else "equal"
            print(f"run {number} on {processes}: {points}: {is_equal}", flush=True)
            record = {
                "provenance": provenance(("jax", "orbax-checkpoint", "numpy")),
                "seed": arguments.seed,
                "runs": len(interruptions),
                "processes": ", ".join(map(str, arguments.processes)),
                "equal": len(interruptions) - len(different),
                "different": different,
                "interruptions": interruptions,
            }
            RESULT.write_text(json.dumps(record, indent=1) + "\n")  # after each run: they take long
    print(table(record))


if __name__ == "__main__":
    main()
