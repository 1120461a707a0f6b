"""A trace of a few steps by JAX's profiler, for finding out where their time goes."""

from contextlib import nullcontext
from pathlib import Path

import jax

from jaxdp.config import Config
from jaxdp.validation import profiled_steps


class NoProfile:
    """Traces nothing."""

    def step(self, number, state):
        return nullcontext()

    def taken(self, number, state):
        pass

    def close(self):
        pass


class Profile:
    """Traces the steps of `steps` into a folder, each under its number, and says how to look at the trace.

    The devices finish what they have before the first of them, and the last of them before the trace ends: speeds logged
    around them are those of a run that is watched.
    """

    def __init__(self, folder: Path, steps: range, say):
        self.folder, self.steps, self.say, self.first = folder, steps, say, None

    def step(self, number: int, state):
        """Around the call of a step; state: on which it works."""
        if number not in self.steps:
            return nullcontext()
        if self.first is None:
            jax.block_until_ready(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python's would bury the rest
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self.first = number
        self.last = number
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
        jax.profiler.stop_trace()
        traces = sorted(self.folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        where = f"{traces[-1]} at https://ui.perfetto.dev, or " if traces else ""
        self.say(
            f"steps {self.first} to {self.last} are traced in {self.folder}; open {where}the directory in TensorBoard with its "
            f"profile plugin (pip install tensorboard-plugin-profile, tensorboard --logdir {self.folder})"
        )
        self.first, self.steps = None, range(0)


def profile_of(config: Config, workdir: Path, taken: int, say):
    """The profile that a config asks for, of a run that has taken so many steps."""
    steps = profiled_steps(config.logging.profile)
    if steps is None:
        return NoProfile()
    if steps[-1] <= taken:
        say(f"logging.profile: steps {steps[0]} to {steps[-1]} were taken in an earlier session; none is traced")
        return NoProfile()
    return Profile(workdir / "profile", steps, say)
