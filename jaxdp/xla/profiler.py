"""Traces of training steps by JAX's profiler, and the share of each part of the step in them."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax

from jaxdp.config import Config
from jaxdp.validation import profiled_steps
from jaxdp.xla import hlo, kernels

# Parts of a step by their `jax.named_scope`, in order; "rest": instructions without one, such as copies.
PARTS = ("augmentation", "forward", "backward", "all-reduce", "gradient_norm", "optimizer", "rest")
CONTAINERS = ("while", "call", "conditional")  # their time is that of the instructions in them


class NoProfiler:
    """A profiler that traces nothing."""

    overhead_seconds = 0.0

    def step(self, number: int, state: Any, program: Any) -> AbstractContextManager:
        """See `Profiler.step`."""
        return nullcontext()

    def after_step(self, number: int, state: Any) -> None:
        """See `Profiler.after_step`."""

    def close(self) -> None:
        """See `Profiler.close`."""


class Profiler:
    """Traces the given steps into a folder, annotated with their numbers, and prints how to open the trace.

    The devices finish earlier work before the first traced step, and the last one before the trace ends, so logged speeds near
    them are not representative. overhead_seconds: time spent on starting, ending and reading the trace.
    """

    def __init__(self, folder: Path, steps: range, info: Callable[[str], None]) -> None:
        self.folder, self.steps, self.info, self.overhead_seconds = folder, steps, info, 0.0
        self.first: int | None = None  # traced step
        self.last = 0
        self.program: Any = None
        self.earlier_traces: set[Path] = set()

    @contextmanager
    def _count_overhead(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.overhead_seconds += time.perf_counter() - began

    def step(self, number: int, state: Any, program: Any) -> AbstractContextManager:
        """A context for the call of a step. program: the compiled step. state: its argument."""
        if number not in self.steps:
            return nullcontext()
        if self.first is None:
            jax.block_until_ready(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Python calls would dominate the trace
            self.earlier_traces = set(self._traces())
            with self._count_overhead():
                jax.profiler.start_trace(self.folder, profiler_options=options)
            self.first = number
        self.last, self.program = number, program
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def after_step(self, number: int, state: Any) -> None:
        """End the trace if the dispatched step was the last one to trace."""
        if self.first is not None and number == self.steps[-1]:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """End the trace, if it has started, and print where it is."""
        if self.first is None:
            return
        with self._count_overhead():
            self._end()

    def _traces(self) -> Iterator[Path]:
        return self.folder.rglob("*.trace.json.gz")

    def _end(self) -> None:
        jax.profiler.stop_trace()
        traces = sorted(set(self._traces()) - self.earlier_traces)  # not by time: the clock may have been set back
        location = f"{traces[-1]} at https://ui.perfetto.dev, or " if traces else ""
        self.info(
            f"steps {self.first} to {self.last} are traced in {self.folder}; open {location}the directory in TensorBoard with "
            f"its profile plugin (pip install tensorboard-plugin-profile, tensorboard --logdir {self.folder})"
        )
        if traces and (shares := time_shares(self.program.as_text(), kernels.read_trace(traces[-1].parent))):
            text = ", ".join(f"{part} {100 * share:.1f} %" for part, share in shares.items())
            self.info(f"device time of these steps: {text}")
        self.first, self.steps, self.program = None, range(0), None


def time_shares(text: str, seconds: dict[str, float]) -> dict[str, float]:
    """The share of each part in a step's time; {} if no instruction was timed. text: compiled HLO. seconds: by instruction."""
    by_part = dict.fromkeys(PARTS, 0.0)
    for instruction in (each for instructions in hlo.parse(text)[0].values() for each in instructions):
        if instruction.opcode not in CONTAINERS:
            by_part[part_of(instruction.attributes)] += seconds.get(instruction.name, 0.0)
    total = sum(by_part.values())
    return {part: time / total for part, time in by_part.items() if time} if total else {}


def part_of(attributes: str) -> str:
    """The part of the step that an instruction belongs to; all-reduces inside the backward pass count as all-reduce."""
    match = re.search(r'op_name="([^"]*)"', attributes)
    path = match[1].split("/") if match else []
    return "all-reduce" if "all-reduce" in path else next((name for name in path if name in PARTS), "rest")


def create_profiler(config: Config, workdir: Path, *, steps_done: int, info: Callable[[str], None]) -> Profiler | NoProfiler:
    """The profiler of a run that has done `steps_done` steps, by `logging.profile`."""
    steps = profiled_steps(config.logging.profile)
    if steps is None:
        return NoProfiler()
    if steps[-1] <= steps_done:
        info(f"logging.profile: steps {steps[0]} to {steps[-1]} were run in an earlier session; not traced")
        return NoProfiler()
    return Profiler(workdir / "profile", steps, info)
