"""Steps of several processes timed in turns, one process working at a time, so that what a machine does meanwhile meets all."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
WARM_UP = 3


def serve(make) -> None:
    """A contender's process: warm up, then for every line on stdin take so many steps and print the seconds.

    make() -> (step(count), what is to be told of it).
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    began = time.perf_counter()
    step, told = make()
    step(1)
    first = time.perf_counter() - began
    step(WARM_UP)
    print(json.dumps(told | {"seconds_to_first_step": first}), file=answers, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        step(int(line))
        print(json.dumps(time.perf_counter() - began), file=answers, flush=True)


class Contender:
    """A process that serves. words: of its command, after Python's name; flags: of XLA, beside those there are."""

    def __init__(self, name: str, words: list[str], flags: str = ""):
        self.name, self.seconds = name, []
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.told = self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}")
        return json.loads(line)

    def steps(self, count: int) -> float:
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self):
        self.process.communicate()


def taken(makers: dict, batch: int, rounds: int, seconds_a_round: float) -> tuple[dict, dict]:
    """({name: row}, {name: error of one that did not start}). makers: by name, each returns a Contender of `batch` images."""
    contenders, failed = [], {}
    for name, make in makers.items():
        print(f"{name} starts ...", file=sys.stderr, flush=True)
        try:
            contenders.append(make())
        except RuntimeError as error:
            failed[name] = str(error)
    counts = {one.name: max(1, round(seconds_a_round / one.steps(1))) for one in contenders}
    for _ in range(rounds):
        for one in contenders:
            one.seconds.append(one.steps(counts[one.name]) / counts[one.name])
    for one in contenders:
        one.close()
    rows = {
        one.name: one.told
        | {
            "steps_a_round": counts[one.name],
            "step_seconds": statistics.median(one.seconds),
            "fastest": min(one.seconds),
            "slowest": max(one.seconds),
            "seconds": one.seconds,
            "images_per_second": batch / statistics.median(one.seconds),
        }
        for one in contenders
    }
    return rows, failed


def ratio(row: dict, base: dict) -> float:
    """How many times as fast as `base`: the median over the rounds, neighbours in time being compared."""
    return statistics.median(there / here for here, there in zip(row["seconds"], base["seconds"], strict=True))
