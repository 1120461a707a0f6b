"""Traces of training steps by JAX's profiler, and each part's share of the step's time."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from jaxdp.distributed import status
from jaxdp.training.callback import Callback
from jaxdp.training.result import TrainResult
from jaxdp.training.run import Run
from jaxdp.xla import hlo, kernels

# Parts of a step by their `jax.named_scope`, in order; "rest": instructions without one, such as copies.
PARTS = ("augmentation", "forward", "backward", "all-reduce", "gradient_norm", "optimizer", "rest")
CONTAINERS = ("while", "call", "conditional")  # their time is the time of the instructions in them


class Profile(Callback):
    """Traces the steps of `logging.profile` into the folder `profile`, annotated with their numbers, and shows how to open the
    trace. Attached on rank 0 with this field.

    The devices finish earlier work before the first traced step, and the last traced step before the trace ends. So the speeds
    logged near these steps are not representative.
    """

    def __init__(self, steps: range) -> None:
        self.steps = steps
        self.first: int | None = None  # traced step
        self.last = 0
        self.annotation = ExitStack()  # of the step that was started last
        self.earlier_traces: set[Path] = set()

    def on_start(self, run: Run) -> None:
        if self.steps[-1] <= run.progress.steps:
            first, last = self.steps[0], self.steps[-1]
            run.info(f"logging.profile: steps {first} to {last} were run in an earlier session; not traced")

    def before_step(self, run: Run, batch: dict[str, jax.Array]) -> None:
        number = run.progress.steps + 1
        self.annotation.close()
        if self.first is not None and number > self.steps[-1]:
            self._end(run)
        if number not in self.steps:
            return
        if self.first is None:
            self._begin(run, number)
        self.last, self.phase = number, run.phase
        self.annotation.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=number))

    def after_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if self.first is not None and metrics["step"] == self.steps[-1]:  # no step has followed
            self._end(run)

    def on_end(self, run: Run, result: TrainResult | None) -> None:
        if self.first is not None:
            self._end(run)

    def _begin(self, run: Run, number: int) -> None:
        status.current().waiting(status.DEVICES)(jax.block_until_ready)(run.state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python calls would dominate the trace
        self.folder, self.first = run.workdir / "profile", number
        self.earlier_traces = set(self._traces())
        with run.clock.excluded():
            jax.profiler.start_trace(self.folder, profiler_options=options)

    def _end(self, run: Run) -> None:
        """End the trace, and show where it is and where the time went."""
        self.annotation.close()
        status.current().waiting(status.DEVICES)(jax.block_until_ready)(run.state)
        with run.clock.excluded():
            jax.profiler.stop_trace()
            traces = sorted(set(self._traces()) - self.earlier_traces)  # not by time: the clock may have been set back
            location = f"{traces[-1]} at https://ui.perfetto.dev, or " if traces else ""
            run.info(
                f"steps {self.first} to {self.last} are traced in {self.folder}; open {location}the directory in TensorBoard "
                f"with its profile plugin (pip install tensorboard-plugin-profile, tensorboard --logdir {self.folder})"
            )
            program: Any = run.compiler.prepare_train(self.phase).result()
            if traces and (shares := time_shares(program.as_text(), kernels.read_trace(traces[-1].parent))):
                text = ", ".join(f"{part} {100 * share:.1f} %" for part, share in shares.items())
                run.info(f"device time of these steps: {text}")
        self.first, self.steps = None, range(0)

    def _traces(self) -> Iterator[Path]:
        return self.folder.rglob("*.trace.json.gz")


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
