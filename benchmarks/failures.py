"""Measures how long the other processes of a run take to exit after one has failed, and whether they name it.

    python benchmarks/failures.py [--times 3] [--processes 2]

Failures: killed (SIGKILL), suspended (SIGSTOP), raising (in its data set), a full disk (mounted at the working directory, needs
root), and missing (never started). Each is tried in every stage in which it is possible, on a random rank. Writes
benchmarks/results/failures.json and prints a table.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from chaos import ROOT, TRAINING, stage

LIMIT_SECONDS = 30
STAGES = ("starting", "compiling", "stepping", "evaluating", "saving")
CASES = [(kind, place) for kind in ("killed", "suspended") for place in STAGES]
CASES += [("raising", "stepping"), ("full disk", "stepping"), ("missing", "starting")]
GUARD = ("--guard.start-minutes", "0.25", "--epochs", "400", "--batch.0.until-epoch", "200")


class Raising:
    """Synthetic images; reading one raises after `ends_at` images."""

    classes = 10

    def __init__(self, examples: int, ends_at: float):
        self.examples, self.ends_at, self.read = examples, ends_at, 0

    def __len__(self):
        return self.examples

    def __getitem__(self, index):
        self.read += 1
        if self.read > self.ends_at:
            raise RuntimeError("this data set raises, as planned")
        return np.full((80, 80, 3), index % 251, np.uint8), index % 10


def raising_process(workdir: str, ends_at: float) -> None:
    """Train as one process of a run whose data set raises after so many images."""
    import tyro

    import jaxdp
    from jaxdp.config import Config, Data
    from jaxdp.recipes import load_config

    config = tyro.cli(Config, default=load_config("digits"), args=[*TRAINING, *GUARD])
    config = dataclasses.replace(config, data=Data(image_size=80))  # too large to be decoded at the start
    jaxdp.train(config, workdir, datasets=(Raising(256, ends_at), Raising(64, float("inf"))))


def environment(rank: int, processes: int, port: int) -> dict:
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(rank)}
    return os.environ | place | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def start(kind: str, victim: int, processes: int, workdir: Path) -> list[subprocess.Popen | None]:
    """Start the processes of a run; None in place of a missing one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    running = []
    for rank in range(processes):
        if kind == "missing" and rank == victim:
            running.append(None)
            continue
        command = [sys.executable, "-u", "-m", "jaxdp", "train", "--workdir", str(workdir), *TRAINING, *GUARD]
        if kind == "raising":
            ends_at = 600 if rank == victim else float("inf")
            command = [sys.executable, "-u", __file__, "--raising", str(workdir), str(ends_at)]
        with open(output_file(workdir, rank), "w") as output:
            variables = environment(rank, processes, port)
            running.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT))
    return running


def trial(kind: str, chosen: str, *, processes: int, folder: Path, draw: random.Random) -> dict:
    """Cause one failure in the chosen stage; returns the outcome for the other processes."""
    victim = draw.randrange(1 if kind == "missing" else 0, processes)
    workdir = folder / "run"
    if kind == "full disk":
        victim = 0  # which writes the log
        workdir.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", workdir], check=True)
    try:
        running = start(kind, victim, processes, workdir)
        began = time.monotonic()
        while kind not in ("missing", "raising") and not (stage(workdir) == chosen and _has_begun(workdir, chosen)):
            assert time.monotonic() - began < 300, "the run did not reach this stage"
            time.sleep(0.002)
        time.sleep(draw.random() * (1.0 if chosen in ("starting", "compiling") else 0.02))
        failed_in = stage(workdir)
        if kind == "killed":
            running[victim].send_signal(signal.SIGKILL)
        elif kind == "suspended":
            running[victim].send_signal(signal.SIGSTOP)
        elif kind == "full disk":
            _fill(workdir)
        elif kind == "raising":
            while "as planned" not in _output(workdir, victim):
                assert time.monotonic() - began < 300, _output(workdir, victim)
                time.sleep(0.01)
            failed_in = "stepping"
        failed = time.monotonic()
        others = [rank for rank in range(processes) if rank != victim]
        for rank in others:
            timeout = max(1.0, failed + 2 * LIMIT_SECONDS - time.monotonic())
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[rank].wait(timeout)
        seconds = time.monotonic() - failed
        codes = [running[rank].poll() for rank in others]
        last = [[line for line in _output(workdir, rank).splitlines() if line.startswith("jaxdp:")][-1:] for rank in others]
        text = str(victim) if chosen == "starting" else f"rank {victim} "  # missing ranks are listed by their numbers
        if kind == "full disk":  # fails on all ranks
            text = "No space left on device"
        named = [bool(lines) and text in lines[0] for lines in last]
        for process in running:
            if process is not None:
                process.kill()
                process.wait()
    finally:
        if kind == "full disk":
            subprocess.run(["umount", "-l", workdir], check=True)
    ended = None not in codes and 0 not in codes
    return {
        "failure": kind,
        "stage": failed_in,
        "victim": victim,
        "seconds": round(seconds, 2),
        "codes": codes,
        "ended": ended,
        "named": all(named),
        "last_line": (last[0] or [""])[0].replace(str(folder), "..."),
    }


def _has_begun(workdir: Path, chosen: str) -> bool:
    """Whether a run has logged some steps, if the chosen stage follows them."""
    log = workdir / "metrics.jsonl"
    return chosen in ("starting", "compiling") or (log.exists() and log.read_bytes().count(b"\n") > 3)


def _fill(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(b"0" * 512)


def output_file(workdir: Path, rank: int) -> Path:
    return workdir.with_suffix(".out" if rank == 0 else f".{rank}.out")


def _output(workdir: Path, rank: int) -> str:
    return output_file(workdir, rank).read_text()


def table(record: dict) -> str:
    """By failure and stage: seconds until the last process exits, and in how many trials all processes name the failure."""
    lines = ["| failure | while | seconds to the last exit | most | ended and named |", "|---|---|---|---|---|"]
    cases = {}
    for row in record["rows"]:
        cases.setdefault((row["failure"], row["stage"]), []).append(row)
    for (kind, place), rows in cases.items():
        seconds = [row["seconds"] for row in rows]
        right = sum(row["ended"] and row["named"] for row in rows)
        lines.append(f"| {kind} | {place} | {statistics.median(seconds):.1f} | {max(seconds):.1f} | {right} of {len(rows)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3, help="trials of each case")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="failures to try; recorded results of others are kept")
    parser.add_argument("--raising", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.raising:
        return raising_process(arguments.raising[0], float(arguments.raising[1]))
    from jaxdp.bench.environment import provenance

    path = ROOT / "benchmarks/results/failures.json"
    kept = json.loads(path.read_text())["rows"] if arguments.only and path.exists() else []
    rows = [row for row in kept if row["failure"] not in arguments.only]
    draw = random.Random(0)
    cache = tempfile.mkdtemp()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    for kind, chosen in CASES:
        for _ in range(arguments.times):
            if arguments.only and kind not in arguments.only:
                continue
            with tempfile.TemporaryDirectory() as made:
                rows.append(trial(kind, chosen, processes=arguments.processes, folder=Path(made), draw=draw))
            print(json.dumps(rows[-1]), flush=True)
            record = {"provenance": provenance(("jax", "numpy")), "processes": arguments.processes, "rows": rows}
            path.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
