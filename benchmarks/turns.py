"""Alternating timing of steps in several processes, one process at a time, so that other load affects all of them."""

import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from common import ROOT

ENVIRONMENT = dict(os.environ)  # before the comparing process sets its own platform
WARM_UP = 3
START_SECONDS, STEP_SECONDS = 400.0, 120.0  # timeouts of a contender


def serve(make) -> None:
    """Main function of a contender's process: warm up, then run the number of steps of each stdin line and print the seconds.

    make() -> (step(count), facts to report).
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout too
    began = time.perf_counter()
    step, facts = make()
    step(1)
    first = time.perf_counter() - began
    step(WARM_UP)
    facts |= {"seconds_to_first_step": first, "xla_flags": os.environ.get("XLA_FLAGS", "")}
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        step(int(line))
        print(json.dumps(time.perf_counter() - began), file=answers, flush=True)


class Contender:
    """A process that runs `serve`. words: arguments of its Python command. flags: additional XLA flags. start_seconds: timeout.

    Raises RuntimeError if it exits or does not answer in time.
    """

    def __init__(self, name: str, words: list[str], flags: str = "", start_seconds: float = START_SECONDS):
        self.name, self.seconds, self.steps_a_round = name, [], 1
        flags = f"{ENVIRONMENT.get('XLA_FLAGS', '')} {flags}".strip()
        environment = ENVIRONMENT | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.facts = self._answer(start_seconds)

    def _answer(self, timeout: float):
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        line = self.process.stdout.readline() if ready else ""
        try:
            return json.loads(line)
        except ValueError:
            if line or not ready:
                self.process.kill()
            self.close()
        why = f"ended with {self.process.returncode}" if ready else f"did not answer within {timeout:.0f} s"
        raise RuntimeError(f"{self.name} {f'answered {line!r}' if line else why}")

    def steps(self, count: int) -> float:
        with suppress(BrokenPipeError):  # it has exited; reading the answer reports that
            self.process.stdin.write(f"{count}\n")
            self.process.stdin.flush()
        return self._answer(STEP_SECONDS * count)

    def close(self) -> None:
        try:
            self.process.communicate(timeout=STEP_SECONDS)
        except (subprocess.TimeoutExpired, ValueError):  # it hangs, or has exited and closed its pipes
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()


def time_alternately(
    makers: dict,
    batch: int,
    rounds: int,
    seconds_a_round: float,
    keep: Callable[[dict, dict], None] = lambda rows, failed: None,
) -> tuple[dict, dict]:
    """({name: row}, {name: error} of failed ones). makers: name -> function that makes a Contender of `batch` images.

    keep: takes what is known after each start and each round; before the first round, rows are of one step.
    """
    contenders, failed = {}, {}

    def attempt(name, call):
        try:
            return call()
        except RuntimeError as error:
            contenders.pop(name, None)
            failed[name] = str(error)

    try:
        for name, make in makers.items():
            print(f"{name} starts ...", file=sys.stderr, flush=True)
            if one := attempt(name, make):
                contenders[name] = one
                if seconds := attempt(name, partial(one.steps, 1)):
                    one.seconds = [seconds]
            keep(rows_of(contenders, batch), failed)
        for one in contenders.values():
            one.steps_a_round, one.seconds = max(1, round(seconds_a_round / one.seconds[0])), []
        for _ in range(rounds):
            for name, one in [*contenders.items()]:
                if seconds := attempt(name, partial(one.steps, one.steps_a_round)):
                    one.seconds.append(seconds / one.steps_a_round)
            keep(rows_of(contenders, batch), failed)
    finally:
        for one in contenders.values():
            one.close()
    return rows_of(contenders, batch), failed


def rows_of(contenders: dict, batch: int) -> dict:
    """{name: row} of a Contender of `batch` images each."""
    return {
        one.name: one.facts
        | {
            "steps_a_round": one.steps_a_round,
            "step_seconds": statistics.median(one.seconds),
            "fastest": min(one.seconds),
            "slowest": max(one.seconds),
            "seconds": one.seconds,
            "images_per_second": batch / statistics.median(one.seconds),
        }
        for one in contenders.values()
    }


def ratio(row: dict, base: dict) -> float:
    """Speed relative to `base`: the median over paired rounds."""
    return statistics.median(
        base_seconds / seconds for seconds, base_seconds in zip(row["seconds"], base["seconds"], strict=True)
    )
