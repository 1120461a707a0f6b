"""The parts of the training loop, which `train.py` calls: steps, evaluations and saves until the plan is done.

What is not needed to compute the result, such as logs, is a `jaxdp.training.callback.Callback`.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxdp.checkpoint.manifest import read_manifest
from jaxdp.data.batch_sources import DataError
from jaxdp.data.prefetch import DeviceIterator
from jaxdp.distributed import status
from jaxdp.distributed.signal_handler import ForcedStop, StopTraining
from jaxdp.errors import TrainingError
from jaxdp.planning import PlannedPhase
from jaxdp.training import ending, request_flags
from jaxdp.training.callback import CallbackError
from jaxdp.training.evaluation import ExampleCollector, evaluate, evaluation_is_due
from jaxdp.training.result import TrainResult, versions
from jaxdp.training.run import Run, StartedStep, open_batches

ADVICE_AFTER_ERROR = "to resume from it with changes, use --resume {path} --accept-changes and a new --workdir"


def begin(run: Run) -> None:
    """Start the callbacks of a restored or initialized run, and do what a stopped session has left to do."""
    run.has_started = True
    run.callbacks.on_start(run)
    run.checkpoints.try_save()
    if run.progress.evaluates_now:  # the previous session stopped before or during it
        evaluate_now(run)
        save_now(run)


@contextmanager
def open_phase(run: Run, phase: PlannedPhase) -> Iterator[tuple[Callable, DeviceIterator]]:
    """(compiled step, remaining batches) of a phase. At the end of the context, completes the steps and saves."""
    step = _enter_phase(run, phase)
    with closing(open_batches(run.compiler, run.datasets, phase, first=run.progress.samples)) as batches:
        run.clock.restart()
        run.phase_began = run.progress.steps
        yield step, batches
        complete_steps(run)
    if phase is not run.plan.phases[-1] and not run.progress.ends_now:
        save_now(run)


def _enter_phase(run: Run, phase: PlannedPhase) -> Callable:
    """Place the state for a phase and return its step: `make_train_step` in `training/step.py`, compiled in the background."""
    compiler, run.phase = run.compiler, phase
    run.processes.set_activity("compile")
    compiled_step = compiler.prepare_train(phase)
    if (layout := compiler.layout(phase)) is not run.layout:
        run.signals.raise_if_stop_agreed()  # before the collectives that gather the state
        run.state, run.layout = status.current().waiting(status.DEVICES)(layout.place)(run.whole_state()), layout
        run.progress.unfrozen = phase.unfrozen
    with run.clock.paused("compilation"):
        step = run.signals.wait_for(compiled_step)
        run.checkpoints.check_trial()
    run.processes.barrier(f"phase {phase.index}")
    return step


def _prepare_later(run: Run) -> None:
    """Compile the remaining programs in the background. A CPU computes the first step before, as both need all its cores."""
    for phase in [phase for phase in run.plan.phases if phase.first_sample >= run.phase.first_sample]:
        run.compiler.prepare_train(phase)
        run.compiler.prepare_evaluation(phase)


def next_batch(run: Run, batches: DeviceIterator) -> dict[str, jax.Array] | None:
    """The next batch on the devices; None after the last one of the phase."""
    waited, step = batches.wait_seconds, run.progress.steps
    run.processes.set_activity("load", step + 1, "waiting for images")
    batch = batches.next(run.signals.wait_for)
    run.clock.add_input_wait(batches.wait_seconds - waited)
    run.processes.set_activity("step", step, "waiting for the results of the previous step")
    return batch


def begin_step(run: Run, batch: dict[str, jax.Array]) -> None:
    """Do what is due between two steps.

    From this check to the start of the step, no process may stop alone: the rest would wait in a collective forever.
    """
    taken = run.progress.steps - run.phase_began
    if taken == 0:
        run.processes.barrier(f"the first step of phase {run.phase.index}")
    elif taken == 2:  # the first of them has been computed
        _prepare_later(run)
    run.signals.raise_if_stop_agreed()
    run.processes.status.begin_iteration("step")
    run.next_record = {}
    run.call_hook("before_step", run.next_record, batch.copy(), request_step=run.progress.steps + 1)
    if run.save_requested:
        save_now(run)


def start_step(run: Run, step: Callable, batch: dict[str, jax.Array]) -> None:
    """Start a step on the devices; returns before it is complete."""
    progress, phase, plan, before = run.progress, run.phase, run.plan, run.progress.samples
    run.processes.set_activity("step", progress.steps + 1, "starting the step")
    rate = plan.learning_rate(before)
    began = time.monotonic()
    run.state, metrics = step(run.state, batch | _requests(run), run.compiler.hyperparameters(phase, rate))
    start_seconds = time.monotonic() - began
    timed = run.clock.start_step(partial(jax.block_until_ready, metrics))
    progress.finish_step(phase.global_batch)
    if evaluation_is_due(plan, before=before, after=progress.samples):
        progress.evaluate_after(progress.steps)
    record = progress.position(plan.examples)
    record |= {"phase": phase.index, "learning_rate": rate, "momentum": phase.momentum, "global_batch": phase.global_batch}
    record |= run.next_record
    is_first, is_last = before == phase.first_sample, progress.samples >= plan.total_samples
    is_logged = is_first or is_last or progress.steps % run.log_every == 0 or bool(run.next_record)
    run.pending.append(StartedStep(record, metrics, timed, start_seconds=start_seconds, is_logged=is_logged))


def _requests(run: Run) -> dict[str, jax.Array]:
    """What this process asks of all others, as a part of a batch."""
    request = run.processes.take_request(run.signals.stop_reason)
    return {request_flags.BATCH_KEY: request_flags.on_devices(request, run.mesh)}


def complete_steps(run: Run, keep: int = 0) -> None:
    """Read the metrics of all started steps but the last `keep`, and pass them to the callbacks.

    Metrics are read one step late to keep the devices busy: they compute a step while the host handles the previous one.
    """
    while len(run.pending) > keep:
        step = run.pending.popleft()
        asked = time.monotonic()
        with status.current().waiting(status.DEVICES):
            record = step.record | to_host_scalars(step.metrics)
            waited = step.start_seconds + time.monotonic() - asked
            record |= run.clock.end_step(step.timed, record["global_batch"])
        run.processes.record_request(record.pop("request"))
        run.processes.status.record_progress()
        run.step_times = waited, run.progress.training_seconds
        run.progress.skipped_steps = record.get("skipped_steps", 0)
        following = record["step"] + 1
        if run.call_hook("after_step", record, MappingProxyType(record), is_logged=step.is_logged, request_step=following):
            run.clock.restart_throughput()
        _notify_saved(run)


def to_host_scalars(metrics: dict[str, jax.Array]) -> dict[str, Any]:
    """Scalars on the host, once the devices have computed them."""
    return {name: np.asarray(value).item() for name, value in metrics.items()}


def evaluate_now(run: Run) -> dict[str, Any]:
    """Evaluate all held-out images and return the record. Raises StopTraining between two batches if the run must stop."""
    complete_steps(run)
    progress, source, signals, processes = run.progress, run.datasets.evaluation, run.signals, run.processes
    progress.evaluation_due = True  # a run that stops before the evaluation is over repeats it
    progress.evaluation_step = progress.stop_step = progress.steps  # it also serves the requests of its callbacks
    processes.set_activity("compile", progress.steps, "waiting for the evaluation program")
    with run.clock.paused("compilation"):
        program = signals.wait_for(run.compiler.prepare_evaluation(run.phase))

    def before_batch() -> dict[str, jax.Array]:
        signals.raise_if_stop_agreed()
        processes.status.begin_iteration("evaluate")
        processes.set_activity("evaluate", detail="a batch")
        return _requests(run)

    processes.set_activity("evaluate")
    run.status("evaluating")
    with run.clock.paused("evaluation"):
        processes.barrier("evaluation")
        signals.raise_if_stop_agreed()  # before the collectives that gather the parameters
        examples = ExampleCollector(len(source), task=run.config.task)
        found = evaluate(
            program,
            *run.eval_variables,
            source=source,
            batch=run.compiler.evaluation_rows(run.phase),
            mesh=run.mesh,
            task=run.config.task,
            before_batch=before_batch,
            on_request=processes.record_request,
            wait_for=signals.wait_for,
            observer=examples,
        )
        evaluation, run.example_images = progress.position(run.plan.examples) | found, examples.arrays()
        processes.set_activity("evaluate", detail="writing the log")
        record = evaluation | {"wall_seconds": run.clock.wall_seconds}
        counts = progress.best, progress.not_improved
        try:
            run.call_hook("after_evaluation", record, MappingProxyType(record), is_logged=True)
        except CallbackError:
            progress.best, progress.not_improved = counts  # a resumed run repeats the evaluation, and counts it again
            raise
        progress.last_evaluation, progress.evaluation_due = evaluation, False
    return evaluation


def save_now(run: Run) -> None:
    """Start saving the state; all metrics up to it have been logged. Waits for the previous save."""
    complete_steps(run)
    run.processes.set_activity("save", run.progress.steps, "waiting for the previous save")
    with run.clock.paused("saving"):
        run.checkpoints.wait()
        _notify_saved(run)
        run.save_requested, run.saved_at, run.saved_samples = False, time.monotonic(), run.progress.samples
        run.checkpoints.save(
            run.whole_state(),
            run.progress.samples,
            _metadata(run),
            placed=run.state,
            before_manifest=run.before_manifest,
        )
        run.saving = run.progress.samples


def _metadata(run: Run) -> dict[str, Any]:
    """What a checkpoint stores beside the arrays."""
    progress = ending.progress_now(run)
    evaluation = progress.last_evaluation
    return {
        "progress": dataclasses.asdict(progress),
        "evaluation": evaluation if evaluation and evaluation["samples"] == progress.samples else None,
        "epoch": run.epoch,
        "config": dataclasses.asdict(run.config),
        "versions": versions(),
        "data": run.data_fingerprint,
        "per_worker_batch": {phase.index: [phase.global_batch, phase.per_worker_batch] for phase in run.plan.phases},
    }


def _notify_saved(run: Run) -> None:
    """Pass a checkpoint to the callbacks once it is complete."""
    if run.saving is None or run.checkpoints.is_saving:
        return
    path, run.saving = run.checkpoints.folder / str(run.saving), None
    if run.callbacks.of_hook["after_save"] and run.checkpoints.last_error is None and path.exists():
        run.callbacks.call("after_save", run, read_manifest(path))


def _wait_for_save(run: Run) -> None:
    """Wait for the save in progress. Raises TrainingError if it rejected the state."""
    run.checkpoints.wait()
    run.checkpoints.check()
    _notify_saved(run)


def finish(run: Run) -> TrainResult:
    """Evaluate and save after the last step, unless that was done, and end the callbacks; returns the result.

    Raises TrainingError if the run has not succeeded.
    """
    progress = run.progress
    ending.check_skipped(run)
    evaluation = progress.last_evaluation
    if is_new := evaluation is None or evaluation["samples"] != progress.samples:
        evaluation = evaluate_now(run)
    ending.check_evaluation(progress.best or evaluation)
    if is_new or run.saved_samples != progress.samples or run.save_requested:
        save_now(run)
    run.processes.set_activity("finish", progress.steps, "waiting for the last save")
    _wait_for_save(run)
    run.result = ending.collect_result(run, ending.result_evaluation(run))
    run.callbacks.on_end(run, run.result)
    return run.result


@contextmanager
def saves_at_the_end(run: Run) -> Iterator[None]:
    """Save the last step before a stop signal, unusable data or a callback end the run; errors say how to resume."""
    try:
        with _saving_on_stop(run):
            yield
    except BaseException as error:
        run.error = error
        if run.processes.num_processes == 1 and not isinstance(error, ForcedStop):
            run.checkpoints.wait()  # with several processes, the save may wait for one that has failed
        if run.has_started:
            run.callbacks.on_end(run, None)
        raise
    finally:
        run.compiler.close()
        run.clock.close()
        run.checkpoints.close()


@contextmanager
def _saving_on_stop(run: Run) -> Iterator[None]:
    try:
        with _saving_on_error(run):
            yield
    except StopTraining:
        with _saving_on_error(run):
            saved = _save_last_step(run)
        raise ending.stop_exception(run, saved=saved) from None


@contextmanager
def _saving_on_error(run: Run) -> Iterator[None]:
    """Save the last step before unusable data or a callback end the run. Errors then name the checkpoint to resume from."""
    try:
        yield
    except (DataError, CallbackError) as error:
        run.error = error  # so callbacks that fail in the steps completed here do not prevent the save
        if run.processes.num_processes == 1:  # other processes are already in a step that this one cannot take
            with _saving_on_error(run):
                _save_last_step(run)
        explained = type(error)(f"{error}; {ending.describe_latest(run)}")
        raise explained from error.__cause__
    except TrainingError as error:
        if error.says_how_to_continue or not run.has_started:
            raise
        raise TrainingError(f"{error}; {ending.describe_latest(run, ADVICE_AFTER_ERROR)}") from None


def _save_last_step(run: Run) -> bool:
    """Save the state after the last step, unless no step has run or it is saved. Returns whether a step has run.

    A process that has reported a failure saves nothing: the other processes would not take part.
    """
    if not run.has_started or run.progress.steps == 0 or run.processes.failure is not None:
        return False
    run.processes.set_activity("save", run.progress.steps, "waiting for the steps in progress")
    complete_steps(run)
    if run.saved_samples != run.progress.samples:
        save_now(run)
    _wait_for_save(run)
    return True
