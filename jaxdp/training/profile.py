"""A trace of a few steps by JAX's profiler, for finding out where their time goes."""

import re
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jax

from jaxdp.bench import kernels
from jaxdp.config import Config
from jaxdp.parallel import hlo
from jaxdp.validation import profiled_steps

# What the step names (`jax.named_scope`), as it goes; "rest": what has no name, such as copies.
PARTS = ("augmentation", "forward", "backward", "all-reduce", "gradient_norm", "optimizer", "rest")
HOLDS_OTHERS = ("while", "call", "conditional")  # the time of these is that of the instructions in them


class NoProfile:
    """Traces nothing."""

    spent = 0.0

    def step(self, number, state, program):
        return nullcontext()

    def taken(self, number, state):
        pass

    def close(self):
        pass


class Profile:
    """Traces the steps of `steps` into a folder, each under its number, and says how to look at the trace.

    The devices finish what they have before the first of them, and the last of them before the trace ends: speeds logged
    around them are those of a run that is watched. spent: seconds that starting, ending and reading the trace took.
    """

    def __init__(self, folder: Path, steps: range, say):
        self.folder, self.steps, self.say, self.first, self.spent = folder, steps, say, None, 0.0

    @contextmanager
    def _spending(self):
        began = time.perf_counter()
        yield
        self.spent += time.perf_counter() - began

    def step(self, number: int, state, program):
        """Around the call of a step, which is a compiled program; state: on which it works."""
        if number not in self.steps:
            return nullcontext()
        if self.first is None:
            jax.block_until_ready(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python's would bury the rest
            with self._spending():
                jax.profiler.start_trace(self.folder, profiler_options=options)
            self.first = number
        self.last, self.program = number, program
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def taken(self, number: int, state):
        """After a step has been dispatched."""
        if self.first is not None and number == self.steps[-1]:
            jax.block_until_ready(state)
            self.close()

    def close(self):
        """End the trace, if one has begun, and say where it is."""
        if self.first is None:
            return
        with self._spending():
            self._end()

    def _end(self) -> None:
        jax.profiler.stop_trace()
        traces = sorted(self.folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        where = f"{traces[-1]} at https://ui.perfetto.dev, or " if traces else ""
        self.say(
            f"steps {self.first} to {self.last} are traced in {self.folder}; open {where}the directory in TensorBoard with its "
            f"profile plugin (pip install tensorboard-plugin-profile, tensorboard --logdir {self.folder})"
        )
        if traces and (shares := shares_of(self.program.as_text(), kernels.traced(self.folder))):
            told = ", ".join(f"{part} {100 * share:.1f} %" for part, share in shares.items())
            self.say(f"of the devices' time in these steps: {told}")
        self.first, self.steps, self.program = None, range(0), None


def shares_of(text: str, seconds: dict[str, float]) -> dict[str, float]:
    """The share of every part in a step's time, {} where none was seen. text: the compiled step's; seconds: by instruction."""
    by_part = dict.fromkeys(PARTS, 0.0)
    for instruction in (one for instructions in hlo.parse(text)[0].values() for one in instructions):
        if instruction.opcode not in HOLDS_OTHERS:
            by_part[part_of(instruction.attributes)] += seconds.get(instruction.name, 0.0)
    whole = sum(by_part.values())
    return {part: one / whole for part, one in by_part.items() if one} if whole else {}


def part_of(attributes: str) -> str:
    """The part that an instruction belongs to; reductions within the backward pass are reductions."""
    found = re.search(r'op_name="([^"]*)"', attributes)
    path = found[1].split("/") if found else []
    return "all-reduce" if "all-reduce" in path else next((name for name in path if name in PARTS), "rest")


def profile_of(config: Config, workdir: Path, taken: int, say):
    """The profile that a config asks for, of a run that has taken so many steps."""
    steps = profiled_steps(config.logging.profile)
    if steps is None:
        return NoProfile()
    if steps[-1] <= taken:
        say(f"logging.profile: steps {steps[0]} to {steps[-1]} were taken in an earlier session; none is traced")
        return NoProfile()
    return Profile(workdir / "profile", steps, say)
