"""Kills training runs at random points and compares their results with those of an uninterrupted run.

    python benchmarks/chaos.py [--runs 50] [--seed 0]

Every run is the same small training. It is killed (SIGKILL) or asked to stop (SIGTERM) one to five times, each time a random
time after a random stage (starting, compiling, stepping, evaluating, saving) begins, and resumed by the same command until it
finishes. Its last parameters, its log without times and its accuracy must equal those of an uninterrupted run. Writes
benchmarks/results/chaos.json and prints the table of kill points.
"""

import argparse
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
TRAINING = [
    *("--data.source", "synthetic", "--data.image-size", "8", "--data.train-examples", "256", "--data.eval-examples", "2000"),
    *("--model.depth", "18", "--model.width", "2", "--model.stem", "small", "--mesh.cpu-devices", "2", "--epochs", "8"),
    *("--batch.0.global-batch", "16", "--batch.0.until-epoch", "4", "--batch.1.global-batch", "32"),
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
SIGNALS = (signal.SIGKILL, signal.SIGTERM)


def start(workdir: Path) -> subprocess.Popen:
    command = [sys.executable, "-u", "-m", "jaxdp", "train", "--workdir", str(workdir), *TRAINING]
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    with open(workdir.with_suffix(".out"), "w") as out:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)


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


def interrupt_session(workdir: Path, draw: random.Random) -> dict:
    """Start a session and kill it in a random stage; returns the stage, the signal and the exit code.

    The session may finish before.
    """
    chosen, number, delay = draw.choice(STAGES), draw.choice(SIGNALS), draw.random() ** 2 * 0.5
    process = start(workdir)
    while process.poll() is None and stage(workdir) != chosen:
        time.sleep(0.002)
    time.sleep(delay)
    killed_in = stage(workdir)
    process.send_signal(number)
    code = process.wait()
    allowed = {signal.SIGKILL: (-signal.SIGKILL, 0), signal.SIGTERM: (EXIT_STOPPED, 0, -signal.SIGTERM)}[number]
    assert code in allowed, (code, chosen, killed_in, workdir.with_suffix(".out").read_text())
    return {"stage": killed_in, "signal": number.name, "exit": code}


def train_to_the_end(workdir: Path) -> dict:
    """Run the last session; returns what the run leaves that does not depend on time."""
    process = start(workdir)
    assert process.wait() == 0, workdir.with_suffix(".out").read_text()
    result = json.loads((workdir / "result.json").read_text())
    log = [{name: value for name, value in line.items() if name not in TIMING} for line in read_log(workdir / "metrics.jsonl")]
    last = latest_valid(workdir / "checkpoints")
    return {"arrays": last.arrays, "log": log, "accuracy": result["accuracy"], "loss": result["loss"], "steps": result["steps"]}


def interrupted_run(folder: Path, number: int, *, seed: int, kills: int | None = None) -> tuple[list[dict], dict]:
    """(the interruptions of a run, its outcome)."""
    draw = random.Random(f"{seed} {number}")
    workdir = folder / f"run-{number}"
    interruptions = [interrupt_session(workdir, draw) for _ in range(kills or draw.randint(1, 5))]
    return interruptions, train_to_the_end(workdir)


def table(record: dict) -> str:
    """Kill points by stage and signal, and how many runs equal the uninterrupted one."""
    lines = ["| killed while | SIGKILL | SIGTERM |", "|---|---|---|"]
    points = Counter(
        (kill["stage"], kill["signal"]) for kills in record["interruptions"] for kill in kills if kill["exit"] != 0
    )
    for name in STAGES:
        lines.append(f"| {name} | {points[name, 'SIGKILL']} | {points[name, 'SIGTERM']} |")
    total = sum(points.values())
    return "\n".join(
        [
            *lines,
            "",
            f"{total} interruptions of {record['runs']} runs; {record['equal']} runs equal the uninterrupted one bit by bit.",
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
        uninterrupted = train_to_the_end(folder / "uninterrupted")
        interruptions, different = [], []
        for number in range(arguments.runs):
            kills, outcome = interrupted_run(folder, number, seed=arguments.seed)
            interruptions.append(kills)
            if outcome != uninterrupted:
                different.append(number)
            points = ", ".join(f"{kill['signal']} {kill['stage']}" for kill in kills)
            print(f"run {number}: {points}: {'DIFFERS' if outcome != uninterrupted else 'equal'}", flush=True)
    record = {
        "provenance": provenance(("jax", "orbax-checkpoint", "numpy")),
        "seed": arguments.seed,
        "runs": arguments.runs,
        "equal": arguments.runs - len(different),
        "different": different,
        "steps": uninterrupted["steps"],
        "interruptions": interruptions,
    }
    (ROOT / "benchmarks/results/chaos.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
