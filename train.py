"""Train a model: the whole run, from the command line to result.json.

`jaxdp.session` has the parts in this order; `jaxdp train` and `jaxdp.train` call them in the same way. A copy of this file is
a trainer to change: `train_phase` is the loop over batches.
"""

import sys

from jaxdp import session
from jaxdp.cli.train import command


def main() -> None:
    """`python train.py FLAGS`."""
    with command(sys.argv[1:], "train.py") as train:  # reads the config; errors in one line; exit code 75 after a signal
        train.result = train_job(train.job)


def train_job(job: "session.Job") -> "session.TrainResult":
    """Train a job to its end, from its newest checkpoint if there is one; of a finished run, return the result."""
    with session.join_processes(job) as joined, session.open_origin(joined) as origin:
        prepared = session.prepare(joined, origin)  # JAX's devices, the data, the plan
        with session.open_directory(joined, prepared) as directory:
            if directory.result is not None:
                return directory.result
            with session.open_run(joined, prepared, directory) as run:  # the model, checkpoints, callbacks
                session.restore_or_initialize(run, prepared.start)
                session.begin(run)
                for phase in run.plan.phases:
                    if run.progress.samples < phase.end and not run.progress.ends_now:
                        train_phase(run, phase)
                return session.finish(run)  # evaluates and saves; the context writes result.json


def train_phase(run: "session.Run", phase: "session.PlannedPhase") -> None:
    """Take the remaining steps of a phase; each has the same global batch, on the same mesh."""
    with session.open_phase(run, phase) as (step, batches):  # the compiled step, and images loaded in the background
        batch = session.next_batch(run, batches)
        while batch is not None and not run.progress.ends_now:
            session.begin_step(run, batch)  # callbacks, requested saves, stop signals
            session.start_step(run, step, batch)  # returns before the devices have computed it
            batch = session.next_batch(run, batches)
            session.complete_steps(run, keep=1)  # the metrics of the step before
            if run.progress.evaluates_now:
                session.evaluate_now(run)


if __name__ == "__main__":
    main()
