"""Steps of several processes timed in turns, one process working at a time, so that what a machine does meanwhile meets all."""

import json
import os
import select
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
ASKED_FOR = dict(os.environ)  # before the process that compares says where it runs itself
WARM_UP = 3
START_SECONDS, STEP_SECONDS = 400.0, 120.0  # after which a contender is given up


def serve(make) -> None:
    """A contender's process: warm up, then for every line on stdin take so many steps and print the seconds.

    make() -> (step(count), what is to be told of it).
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    began = time.perf_counter()
    step, told = make()
    step(1)
    first = time.perf_counter() - began
    step(WARM_UP)
    told |= {"seconds_to_first_step": first, "xla_flags": os.environ.get("XLA_FLAGS", "")}
    print(json.dumps(told), file=answers, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        step(int(line))
        print(json.dumps(time.perf_counter() - began), file=answers, flush=True)


class Contender:
    """A process that serves. words: of its command, after Python's name; flags: of XLA, beside those there are.

    Raises RuntimeError where it ends, or does not answer in time.
    """

    def __init__(self, name: str, words: list[str], flags: str = ""):
        self.name, self.seconds = name, []
        flags = f"{ASKED_FOR.get('XLA_FLAGS', '')} {flags}".strip()
        environment = ASKED_FOR | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.told = self._answer(START_SECONDS)

    def _answer(self, patience: float):
        there, _, _ = select.select([self.process.stdout], [], [], patience)
        line = self.process.stdout.readline() if there else ""
        try:
            return json.loads(line)
        except ValueError:
            if line or not there:
                self.process.kill()
            self.close()
        why = f"ended with {self.process.returncode}" if there else f"did not answer within {patience:.0f} s"
        raise RuntimeError(f"{self.name} {f'answered {line!r}' if line else why}")

    def steps(self, count: int) -> float:
        with suppress(BrokenPipeError):  # it has ended, as its answer will tell
            self.process.stdin.write(f"{count}\n")
            self.process.stdin.flush()
        return self._answer(STEP_SECONDS * count)

    def close(self) -> None:
        try:
            self.process.communicate(timeout=STEP_SECONDS)
        except (subprocess.TimeoutExpired, ValueError):  # it hangs; or its pipes are closed, as it has ended
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()


def taken(makers: dict, batch: int, rounds: int, seconds_a_round: float) -> tuple[dict, dict]:
    """({name: row}, {name: error of one that has failed}). makers: by name, each returns a Contender of `batch` images."""
    contenders, counts, failed = {}, {}, {}

    def tried(name, call):
        try:
            return call()
        except RuntimeError as error:
            contenders.pop(name, None)
            failed[name] = str(error)

    try:
        for name, make in makers.items():
            print(f"{name} starts ...", file=sys.stderr, flush=True)
            if one := tried(name, make):
                contenders[name] = one
        for name, one in [*contenders.items()]:
            if seconds := tried(name, lambda one=one: one.steps(1)):
                counts[name] = max(1, round(seconds_a_round / seconds))
        for _ in range(rounds):
            for name, one in [*contenders.items()]:
                if seconds := tried(name, lambda name=name, one=one: one.steps(counts[name])):
                    one.seconds.append(seconds / counts[name])
    finally:
        for one in contenders.values():
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
        for one in contenders.values()
    }
    return rows, failed


def ratio(row: dict, base: dict) -> float:
    """How many times as fast as `base`: the median over the rounds, neighbours in time being compared."""
    return statistics.median(there / here for here, there in zip(row["seconds"], base["seconds"], strict=True))
