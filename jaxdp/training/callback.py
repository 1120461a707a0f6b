"""Callbacks: what is attached to the training loop, but is not needed to compute its result."""

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import jax

from jaxdp.checkpoint.manifest import Manifest
from jaxdp.distributed.signal_handler import StopTraining
from jaxdp.distributed.status import Failure
from jaxdp.errors import TrainingError, first_line, nearest, place_in_user_code, printable_lines, suggest
from jaxdp.training.result import TrainResult
from jaxdp.training.run import Run

INSTEAD_OF_CHANGES = (
    "callbacks change nothing of the training: to freeze stages until an epoch, use finetune.unfreeze_epoch; for other "
    "rates, use optimizer.groups, or scale updates in your own jaxdp.register_optimizer"
)

PREFIXES = ("on_", "before_", "after_")  # of the methods of a callback
ERRORS = (Exception, SystemExit)  # sys.exit() in a callback would end one process as if the run were finished


class Callback:
    """Base class of callbacks, whose methods do nothing. `jaxdp.train(config, workdir, callbacks=[...])` attaches them.

    Processes: every process of the run calls the same methods in the same order, except `after_save`. Collective operations
    (`run.params`, `run.predict`) must be called by all of them; write files and print on one, `if run.is_rank0`.
    Order: first the callbacks of the run itself (checks, advice, audits, early stopping, checkpoints), then the
    user's in the order of the list. The loggers come last, so they see what all callbacks have logged. `on_end` has the reverse
    order.
    Blocking: the devices compute the next step meanwhile. A method that takes longer than a step, or reads arrays of
    `run.state`, delays the run, and every other process with it.
    Errors: an exception ends the run, with the class and the method of the callback in its message. A run of one process first
    saves its last step; a run of several processes continues from its last checkpoint. A callback with `detach_on_error` is
    detached instead, with a message, and the run continues. If a run has failed, an exception in `on_end` is only shown.
    Changes: a callback must not change the training. If it changes `run.state` or a config, the run ends with an error, and the
    state stays as it was.
    """

    detach_on_error = False

    def on_start(self, run: Run) -> None:
        """Called once, when the state has been restored or initialized and before the first step of the session."""

    def before_step(self, run: Run, batch: dict[str, jax.Array]) -> None:
        """Called before a step is started. batch: its arrays on the devices. `run.state` is its input; the metrics of the step
        before may not be known yet."""

    def after_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Called with the metrics of a completed step. The next step is already running, and `run.state` is its result. No step
        is running before an evaluation, a save or an audit, and after the last step of a phase.

        metrics: the step's record, numbers on the host; see `jaxdp.run_records.RECORD_FIELDS`. `run.is_logged`
        is whether the log receives this record.
        """

    def after_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        """Called with the record of an evaluation, of `run.state`; no step is running."""

    def after_save(self, run: Run, checkpoint: Manifest) -> None:
        """Called with a complete checkpoint, between two steps; not at the same step on every process."""

    def on_end(self, run: Run, result: TrainResult | None) -> None:
        """Called once, at the end of the session. result: None after a stop or an error, which is `run.error`."""


class CallbackError(TrainingError):
    """A callback of the user raised an exception, which is the cause of this one."""

    def _render_traceback_(self) -> list[str]:
        own = traceback.format_exception(self.__cause__) if self.__cause__ else []
        return [*map(printable_lines, own), *super()._render_traceback_()]


class Callbacks:
    """The callbacks of a run, called in order. own: of the run. users: errors name these. loggers: called last."""

    HOOKS = ("before_step", "after_step", "after_evaluation", "after_save")

    def __init__(self, own: Iterable[Callback], users: Iterable[Callback] = (), loggers: Iterable[Callback] = ()) -> None:
        self.users = [*users]
        self.attached = [*own, *self.users, *loggers]
        self.started: list[Callback] = []  # those whose on_start was called and whose on_end was not
        self._find_callbacks()

    def _find_callbacks(self) -> None:
        """Find the callbacks of each hook whose method does something, and the function that calls it."""
        self.of_hook = {
            hook: [
                (callback, self._method(callback, hook))
                for callback in self.attached
                if getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)
            ]
            for hook in self.HOOKS
        }

    def _method(self, callback: Callback, hook: str) -> Callable[..., None]:
        return partial(_call_watched, callback, hook) if self._is_users(callback) else getattr(callback, hook)

    def _is_users(self, callback: Callback) -> bool:
        return any(each is callback for each in self.users)  # `in` would compare arrays of a dataclass

    def on_start(self, run: Run) -> None:
        hooks = [name for name in vars(Callback) if name.startswith(PREFIXES)]
        for callback in self.users:
            for name in [name for name in dir(callback) if not name.startswith("_") and not hasattr(Callback, name)]:
                is_method = callable(getattr(type(callback), name, None))
                if name.startswith(PREFIXES) or (is_method and nearest(name, hooks)):
                    hint = suggest(name, hooks)
                    run.info(f"{type(callback).__name__}.{name} is never called; it is no method of a callback: {hint}")
        for callback in [*self.attached]:
            self.started.append(callback)
            self._call(callback, "on_start", run)
        self._find_callbacks()  # on_start may set methods

    def on_end(self, run: Run, result: TrainResult | None) -> None:
        """Call all in reverse order, even after exceptions. Then raise the first, or show all if the run has failed already."""
        errors, cause = [], ""
        if run.error is not None:  # other processes do not know of it yet
            reported = Failure.of(run.error)
            cause = f" after: {reported.reason} {reported.place}".rstrip()
        while self.started:
            callback = self.started.pop()
            try:
                with run.processes.status.performing(f"ending {type(callback).__name__}{cause}"):  # drawing a plot is no hang
                    self._call(callback, "on_end", run, result)
            except Exception as error:
                errors.append(error)
        if errors and run.error is None:
            raise errors[0]
        for each in errors:
            run.info(first_line(each))

    def call(self, hook: str, run: Run, argument: Any) -> None:
        """Call one of HOOKS of all callbacks. After an error of a user's callback, the remaining ones are still called: they
        write the log. If the run has failed already, errors are shown."""
        failure: CallbackError | None = None
        for callback, method in self.of_hook[hook]:
            try:
                method(run, argument)
            except ERRORS as error:
                if found := self._failure_of(callback, hook, error, run=run):
                    self._call_no_more(callback)  # the run ends, and may complete a step before
                    failure = failure or found
        if failure is not None and run.error is None:
            raise failure
        if failure is not None:
            run.info(first_line(failure))

    def _call(self, callback: Callback, hook: str, run: Run, *arguments: Any) -> None:
        try:
            self._method(callback, hook)(run, *arguments)
        except ERRORS as error:
            if failure := self._failure_of(callback, hook, error, run=run):
                raise failure from failure.__cause__

    def _failure_of(self, callback: Callback, hook: str, error: BaseException, *, run: Run) -> CallbackError | None:
        """The error of a user's callback; None for a callback that is detached instead. Raises any other error again."""
        if isinstance(error, StopTraining):
            raise error
        method = f"{getattr(callback, 'name', type(callback).__name__)}.{hook}"
        is_users = self._is_users(callback)
        place = place_in_user_code(error) if is_users else ""
        what = f"{method} raised {type(error).__name__}{place}: {first_line(error)}"
        if callback.detach_on_error:
            self._detach(callback)
            run.info(f"{what}; the run continues without it")
            return None
        if not is_users:
            raise error
        if isinstance(error, CallbackError):
            return error
        changes = isinstance(error, FrozenInstanceError) or "has no setter" in str(error)
        advice = f"; {INSTEAD_OF_CHANGES}" if changes else ""
        failure = CallbackError(f"the callback {what}{advice}")
        failure.__cause__ = error
        return failure

    def _detach(self, callback: Callback) -> None:
        self.started = [each for each in self.started if each is not callback]
        self._call_no_more(callback)

    def _call_no_more(self, callback: Callback) -> None:
        """Call no method of a callback, except `on_end` if it has started."""
        self.attached = [each for each in self.attached if each is not callback]
        self._find_callbacks()


def _call_watched(callback: Callback, hook: str, run: Run, *arguments: Any) -> None:
    """Call a user's method. Raises CallbackError if it has changed the state, which is then as before."""
    leaves, structure = jax.tree.flatten(getattr(run, "state", None))
    try:
        getattr(callback, hook)(run, *arguments)
    finally:
        after = jax.tree.leaves(getattr(run, "state", None))
        same = [id(leaf) for leaf in leaves] == [id(leaf) for leaf in after]
        if not same:
            run.state = jax.tree.unflatten(structure, leaves)
    if not same:
        raise CallbackError(f"the callback {type(callback).__name__}.{hook} changed run.state; {INSTEAD_OF_CHANGES}")
