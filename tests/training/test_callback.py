"""Callbacks: when `jaxdp.training.loop` calls them, what they can ask a run for, and what their errors do."""

import dataclasses
import json
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from helpers.processes import ROOT, launch, wait_for_exit
from helpers.runs import Interrupted, Recorder, outcome, outcome_of_whole_run, train_shown, train_until
from helpers.step import with_parts
from PIL import Image
from sklearn.metrics import precision_score, recall_score

import jaxdp
from jaxdp import Callback, ConfigError, Stopped, TrainingError, train
from jaxdp.checkpoint.listing import read_manifests
from jaxdp.config import Checkpoint
from jaxdp.inference.load_run import load_params
from jaxdp.run_records import read_log
from jaxdp.training.run import Run


class Events(Callback):
    """Lists the methods that are called, with the step, and with the steps that were started."""

    def __init__(self, events):
        self.events = events

    def on_start(self, run):
        self.events.append(("on_start", run.progress.steps))

    def before_step(self, run, batch):
        self.events.append(("before_step", run.progress.steps + 1, batch["labels"].shape))

    def after_step(self, run, metrics):
        self.events.append(("after_step", metrics["step"], run.progress.steps))

    def after_evaluation(self, run, evaluation):
        self.events.append(("after_evaluation", evaluation["step"], run.progress.steps))

    def after_save(self, run, checkpoint):
        self.events.append(("after_save", checkpoint.samples))

    def on_end(self, run, result):
        self.events.append(("on_end", result and result.steps, type(run.error).__name__))


def without_saves(events):
    return [event for event in events if event[0] != "after_save"]


@pytest.fixture
def rare(tiny):
    """Fifteen steps, ten of 8 images and five of 16; evaluated and saved at the end of a phase or of the run only."""
    return with_parts(tiny, evaluation={"every_epochs": None}, checkpoint={"every_epochs": None, "keep": 20})


def test_methods_are_called_in_order_and_the_next_step_is_running_after_a_step(rare, tmp_path):
    events = []
    train(rare, tmp_path, callbacks=[Events(events)])
    assert [event[1] for event in events if event[0] == "after_save"] == [80, 160]
    expected = [("on_start", 0)]
    for step in range(1, 11):
        expected.append(("before_step", step, (8,)))
        expected += [("after_step", step - 1, step)] * (step > 1)
    expected.append(("after_step", 10, 10))  # the phase ends
    for step in range(11, 16):
        expected.append(("before_step", step, (16,)))
        expected += [("after_step", step - 1, step)] * (step > 11)
    expected += [("after_step", 15, 15), ("after_evaluation", 15, 15), ("on_end", 15, "NoneType")]
    assert without_saves(events) == expected


class Logs(Callback):
    def before_step(self, run, batch):
        if run.progress.steps + 1 == 3:
            run.log(before_step_3=np.float32(0.5))

    def after_step(self, run, metrics):
        if metrics["step"] == 5:
            run.log(doubled=2 * metrics["loss"])

    def after_evaluation(self, run, evaluation):
        run.log(error_rate=1 - evaluation["eval_accuracy"], images=evaluation["eval_examples"])


def test_logged_values_are_in_the_record_at_hand_and_make_it_logged(rare, tmp_path):
    train(with_parts(rare, logging={"every_steps": 100}), tmp_path, callbacks=[Logs()])
    records = read_log(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 3, 5, 11, 15, 15]
    by_step = {record["step"]: record for record in records if "loss" in record}
    assert (by_step[3]["before_step_3"], by_step[5]["doubled"]) == (0.5, 2 * by_step[5]["loss"])
    (evaluation,) = [record for record in records if "eval_loss" in record]
    assert evaluation["error_rate"] == 1 - evaluation["eval_accuracy"]
    assert evaluation["images"] == 23


@pytest.mark.parametrize("value", [10**5000, "3.5", b"3.5", None], ids=lambda value: type(value).__name__)
def test_log_refuses_what_is_no_number(rare, tmp_path, value):
    class LogsIt(Callback):
        def after_step(self, run, metrics):
            run.log(fine=1, mine=value)

    with pytest.raises(
        TrainingError, match=rf"log\(mine=\.\.\.\): must be a number .*{type(value).__name__ if value else None}"
    ):
        train(rare, tmp_path, callbacks=[LogsIt()])


class Asks(Callback):
    """Asks for a checkpoint after step 3, for an evaluation after step 6, and for the end after step 9."""

    def after_step(self, run, metrics):
        if metrics["step"] == 3:
            run.save()
        if metrics["step"] == 6:
            run.evaluate()
        if metrics["step"] == 9:
            run.stop("it is good enough")


def test_run_saves_evaluates_and_stops_after_the_step_that_is_running(rare, tmp_path):
    screen = Recorder()
    result = train_shown(rare, tmp_path, screen=screen, callbacks=[Asks()])
    assert (result.steps, result.stopped_early, result.stop_reason) == (10, True, "it is good enough")
    assert any(line.endswith("10 steps; stopped early: it is good enough") for line in screen.lines)
    assert [manifest.samples for manifest in read_manifests(tmp_path / "checkpoints")] == [80, 32]
    evaluated = [record["step"] for record in read_log(tmp_path / "metrics.jsonl") if "eval_loss" in record]
    assert evaluated == [7, 10]
    assert train(rare, tmp_path) == result  # it is finished


def test_evaluation_that_is_due_anyway_meets_what_after_step_asks_for(tiny, rare, tmp_path):
    """The step of the metrics is evaluated next: no other evaluation follows the next step, and a run that stops ends there."""

    class Evaluates(Callback):
        def after_step(self, run, metrics):
            run.evaluate()

    class StopsAt7(Callback):
        def after_step(self, run, metrics):
            if metrics["step"] == 7:
                run.stop("seven")

    train(rare, tmp_path / "all", callbacks=[Evaluates()])
    evaluated = [record["step"] for record in read_log(tmp_path / "all/metrics.jsonl") if "eval_loss" in record]
    assert evaluated == [2, 4, 6, 8, 10, 12, 14, 15]
    assert train(tiny, tmp_path / "tiny", callbacks=[StopsAt7()]).steps == 7  # the first epoch ends
    assert train(rare, tmp_path / "rare", callbacks=[StopsAt7()]).steps == 8


@pytest.mark.parametrize("ask", ["stop", "interrupt"])
def test_reason_must_be_text_and_is_shown_in_one_line(rare, tmp_path, ask):
    class AsksWithReason(Callback):
        def after_step(self, run, metrics):
            for reason in (None, "", " ", 5):
                with pytest.raises(ValueError, match=rf"{ask}\({reason!r}\): the reason must be text"):
                    getattr(run, ask)(reason)
            getattr(run, ask)("red \x1b[31m\nline")

    screen = Recorder()
    if ask == "stop":
        result = train_shown(rare, tmp_path, screen=screen, callbacks=[AsksWithReason()])
        assert (result.steps, result.stop_reason) == (2, r"red \x1b[31m\nline")
    else:
        with pytest.raises(Stopped, match=r"stopped by red \\x1b\[31m\\nline after step 2 "):
            train_shown(rare, tmp_path, screen=screen, callbacks=[AsksWithReason()])
    assert "\x1b" not in "".join(screen.lines)


def test_run_that_a_callback_has_stopped_stays_stopped_after_a_kill_unless_it_is_changed(rare, tmp_path):
    class Killed(Asks):
        def on_end(self, run, result):
            raise Interrupted  # the last checkpoint is complete, result.json is not written

    with pytest.raises(TrainingError, match="Interrupted"):
        train(rare, tmp_path, callbacks=[Killed()])
    result = train(rare, tmp_path)
    assert (result.steps, result.stop_reason) == (10, "it is good enough")
    assert train(dataclasses.replace(rare, epochs=4.0), tmp_path, accept_changes=True).stop_reason is None


class AsksOnce(Callback):
    """Asks for something in after_step of a step, and then for a checkpoint before the next one. With `interrupted`, the run
    has been asked to stop at the same place before."""

    def __init__(self, ask, step, *, interrupted=False):
        self.ask, self.step, self.interrupted = ask, step, interrupted

    def before_step(self, run, batch):
        if run.progress.steps == self.step and run.saved_samples != run.progress.samples:
            run.save()

    def after_step(self, run, metrics):
        if metrics["step"] == self.step - 1 and self.interrupted:
            run.interrupt("a test")
        if metrics["step"] == self.step:
            self.ask(run)


def evaluate_and_stop(run):
    run.evaluate()
    run.stop("it is good enough")


@pytest.mark.parametrize(
    ("step", "kill"),
    [
        pytest.param(4, {"step": 5}, id="within a phase"),
        pytest.param(7, {"evaluated": 56}, id="evaluated", marks=pytest.mark.slow),
        pytest.param(10, {"step": 11}, id="last of a phase", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("ask", [Run.evaluate, lambda run: run.stop("it is good enough"), evaluate_and_stop])
def test_what_is_asked_for_before_a_checkpoint_comes_at_the_same_step_after_an_interruption(tiny, tmp_path, ask, step, kill):
    """Evaluations, their values and the last step. The checkpoint completes the step, whose successor is not running yet."""
    config = dataclasses.replace(tiny, checkpoint=Checkpoint(every_epochs=None, keep=20))
    train(config, tmp_path / "whole", callbacks=[AsksOnce(ask, step)])
    train_until(config, tmp_path / "killed", **kill, callbacks=[AsksOnce(ask, step)])
    with pytest.raises(Stopped):
        train(config, tmp_path / "stopped", callbacks=[AsksOnce(ask, step, interrupted=True)])
    assert next(read_manifests(tmp_path / "stopped/checkpoints")).samples == 8 * step
    for name in ("killed", "stopped"):
        train(config, tmp_path / name, callbacks=[AsksOnce(ask, step)])
        assert outcome(tmp_path / name) == outcome(tmp_path / "whole")


class Predicts(Callback):
    """Predictions of the held-out images, whose 23 do not divide among four devices."""

    def after_evaluation(self, run, evaluation):
        self.images, self.labels = run.datasets.evaluation.batch(np.arange(23), np.arange(23))
        self.logits, self.params = run.predict(self.images), run.params
        self.accuracy = (self.logits.argmax(-1) == self.labels).mean(), evaluation["eval_accuracy"]


class FailsAfterStep(Callback):
    def after_step(self, run, metrics):
        if metrics["step"] >= 5:
            raise KeyError("my own mistake") from ValueError("\x1b[2J cause")


class FailsAfterEvaluation(Callback):
    def after_evaluation(self, run, evaluation):
        raise ValueError("no such class\x1b[2J\nat all\x1b[2J")


@pytest.mark.parametrize(
    ("callback", "samples", "error"),
    [
        (FailsAfterStep, 48, r"FailsAfterStep.after_step raised KeyError at test_callback.py:\d+: 'my own mistake'"),
        (
            FailsAfterEvaluation,
            160,
            r"FailsAfterEvaluation.after_evaluation raised ValueError at test_callback.py:\d+: no such",
        ),
    ],
)
def test_error_of_a_user_s_callback_ends_the_run_saved_and_names_it(rare, tmp_path, callback, samples, error):
    with pytest.raises(TrainingError) as caught:
        train(rare, tmp_path / "run", callbacks=[callback()])
    assert re.match(rf"the callback {error}.*; the last valid checkpoint is ", str(caught.value))
    assert isinstance(caught.value.__cause__, (KeyError, ValueError))
    in_a_notebook = "".join(caught.value._render_traceback_())
    assert "test_callback.py" in in_a_notebook
    assert in_a_notebook.endswith(str(caught.value))
    assert (r"\x1b[2J" in in_a_notebook, "\x1b" in in_a_notebook + str(caught.value)) == (True, False)
    assert next(read_manifests(tmp_path / "run/checkpoints")).samples == samples
    train(rare, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome_of_whole_run(rare)


@pytest.mark.parametrize(
    "error",
    [ConfigError("epochs", 3, reason="my own"), Stopped("my own"), SystemExit("my own")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(("hook", "samples"), [("after_step", 48), ("on_end", 160)])
def test_error_of_jaxdp_or_an_exit_in_a_callback_is_an_error_of_the_callback(rare, tmp_path, error, hook, samples):
    def fails(run, argument):
        if hook == "on_end" or argument["step"] == 5:
            raise error

    callback = Callback()
    setattr(callback, hook, fails)
    raised = rf"the callback Callback\.{hook} raised {type(error).__name__} at test_callback\.py:\d+: .*my own"
    with pytest.raises(TrainingError, match=rf"{raised}; the last valid checkpoint is ") as caught:
        train(rare, tmp_path, callbacks=[callback])
    assert (caught.value.exit_code, caught.value.__cause__) == (1, error)
    assert next(read_manifests(tmp_path / "checkpoints")).samples == samples


def test_callbacks_that_fail_while_a_stop_is_saved_are_named_and_do_not_prevent_the_save(rare, tmp_path):
    class FailsAfterStop(Callback):
        def after_step(self, run, metrics):
            if metrics["step"] == 5:
                run.interrupt("a test")
            if metrics["step"] == 6:
                raise KeyError("my own mistake")

    class FailsAfterSave(Callback):
        def after_save(self, run, checkpoint):
            raise OSError("no space")

    def saved(callbacks, error):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        screen = Recorder()
        with pytest.raises(TrainingError, match=rf"{error}.*; the last valid checkpoint is "):
            train_shown(rare, tmp_path / "run", screen=screen, callbacks=callbacks)
        assert next(read_manifests(tmp_path / "run/checkpoints")).samples == 48
        return screen.lines

    after_save = r"the callback FailsAfterSave\.after_save raised OSError at test_callback\.py:\d+: no space"
    saved([AsksOnce(lambda run: run.interrupt("a test"), 5), FailsAfterSave()], after_save)
    lines = saved([FailsAfterStop(), FailsAfterSave()], r"the callback FailsAfterStop\.after_step raised KeyError")
    assert any(re.match(after_save, line) for line in lines)


@dataclasses.dataclass
class Optional(Callback):
    """Fails at a step. Two of them cannot be compared."""

    weights: np.ndarray
    fails_at: int
    detach_on_error = True

    def after_step(self, run, metrics):
        self.seen = metrics["step"]
        if metrics["step"] == self.fails_at:
            raise KeyError("my own mistake")

    def on_end(self, run, result):
        self.ended = True


def test_callback_that_detaches_on_error_is_named_once_and_no_longer_called(rare, tmp_path):
    first, second, screen = Optional(np.zeros(2), 99), Optional(np.zeros(2), 5), Recorder()
    train_shown(rare, tmp_path, callbacks=[first, second], screen=screen)
    (line,) = [line for line in screen.lines if "Optional" in line]
    raised = r"Optional.after_step raised KeyError at test_callback.py:\d+: 'my own mistake'"
    assert re.fullmatch(rf"{raised}; the run continues without it", line)
    assert (first.seen, second.seen) == (15, 5)
    assert (hasattr(first, "ended"), hasattr(second, "ended")) == (True, False)


def test_methods_that_are_set_on_a_callback_are_called(rare, tmp_path):
    class SetsAtStart(Callback):
        def on_start(self, run):
            self.after_evaluation = lambda run, evaluation: steps.append(evaluation["step"])

    callback, steps = Callback(), []
    callback.after_step = lambda run, metrics: steps.append(metrics["step"])
    train(rare, tmp_path, callbacks=[callback, SetsAtStart()])
    assert steps == [*range(1, 16), 15]


def test_on_end_is_called_without_a_result_after_a_stop_and_after_an_error(rare, tmp_path):
    class StopsAt5(Callback):
        def after_step(self, run, metrics):
            if metrics["step"] == 5:
                signal.raise_signal(signal.SIGTERM)

    events = []
    with pytest.raises(Stopped):
        train(rare, tmp_path, callbacks=[Events(events), StopsAt5()])
    assert without_saves(events)[-1] == ("on_end", None, "Stopped")
    recorder = Recorder(step=9)
    with pytest.raises(Interrupted):
        train_shown(rare, tmp_path, callbacks=[Events(events)], screen=recorder)
    assert events[-1] == ("on_end", None, "Interrupted")


def test_each_callback_that_ends_has_the_whole_time_without_progress_and_is_named(rare, tmp_path):
    """Such as one that draws a plot, or a user's that sends the checkpoint elsewhere."""

    class Ends(Callback):
        def on_end(self, run, result):
            status = run.processes.status
            seen.append((status.detail, status.clock - status.last_progress))
            status.last_progress -= 1_000.0

    seen = []
    train(rare, tmp_path, callbacks=[Ends(), Ends()])
    (detail, idle), second = seen
    assert (detail, second) == ("ending Ends", ("ending Ends", idle))
    assert idle < 1_000.0


def test_callback_that_gets_stuck_after_an_error_is_shown_with_the_error(rare, tmp_path):
    class Fails(Callback):
        def after_step(self, run, metrics):
            raise OSError("the disk is on fire")

        def on_end(self, run, result):
            seen.append(run.processes.status.detail)

    seen = []
    with pytest.raises(TrainingError, match="the disk is on fire"):
        train(rare, tmp_path, callbacks=[Fails()])
    assert re.search(r"ending Fails after: .*the disk is on fire.* in after_step", seen[0])


def test_error_in_on_end_of_a_failed_run_does_not_hide_the_failure(rare, tmp_path):
    class FailsAtTheEnd(Callback):
        def on_end(self, run, result):
            raise OSError("no space")

    screen = train_until(rare, tmp_path, step=5, callbacks=[FailsAtTheEnd()])
    raised = r"the callback FailsAtTheEnd\.on_end raised OSError at test_callback.py:\d+: no space"
    assert any(re.match(raised, line) for line in screen.lines)
    with pytest.raises(TrainingError, match=raised):
        train(rare, tmp_path, callbacks=[FailsAtTheEnd()])


def test_methods_that_are_no_hooks_are_named_at_the_start(rare, tmp_path):
    class Misspelt(Callback):
        def on_epoch_end(self, run):
            raise AssertionError

        after_evalution = afterStep = draw = on_epoch_end

    screen = Recorder()
    train_shown(rare, tmp_path, callbacks=[Misspelt()], screen=screen)
    lines = [line for line in screen.lines if "Misspelt" in line]
    found = [
        re.match(r"Misspelt\.(\w+) is never called.*: (?:did you mean (\w+)\? )?choose from on_start, ", line).groups()
        for line in lines
    ]
    assert found == [("afterStep", "after_step"), ("after_evalution", "after_evaluation"), ("on_epoch_end", None)]


@pytest.mark.parametrize("callbacks", [Events, [Events], [object()], 5, "wandb"])
def test_train_with_objects_that_are_no_callbacks_raises(tiny, tmp_path, callbacks):
    with pytest.raises(ConfigError) as error:
        train(tiny, tmp_path, callbacks=callbacks)
    assert (error.value.field, error.value.reason) == ("callbacks", "not a callback")
    assert not list(tmp_path.iterdir())


class Empties(Callback):
    """Removes the images and labels of every batch that it is shown."""

    def before_step(self, run, batch):
        batch.clear()


def test_callbacks_change_nothing_of_a_run(tiny, tmp_path):
    train(tiny, tmp_path, callbacks=[Events([]), Predicts(), Empties()])
    assert outcome(tmp_path) == outcome_of_whole_run(tiny)


def examples_of_the_page():
    """The classes of docs/extending.md, by name."""
    page = (ROOT / "docs/extending.md").read_text()
    blocks = re.findall(r"```python\n(class \w+\(jaxdp\.Callback\):\n.*?)```", page, re.DOTALL)
    names = {"jaxdp": jaxdp, "jax": jax, "np": np, "Image": Image, "time": time}
    for block in blocks:
        exec(block.split("jaxdp.train(")[0], names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_predictions_are_those_of_the_checkpoint_and_examples_of_the_page_agree_with_sklearn(rare, tmp_path, update):
    config = with_parts(rare, optimizer={"average_decay": 0.9}, reduce={"update": update})
    names, seen = examples_of_the_page(), Predicts()
    train(config, tmp_path, callbacks=[names[name]() for name in ("PerClass", "WorstMistakes", "GradientNorms")] + [seen])
    assert seen.accuracy[0] == seen.accuracy[1]
    jax.tree.map(np.testing.assert_array_equal, seen.params, load_params(tmp_path)["params"])
    assert (seen.logits.shape, seen.logits.dtype) == ((23, 6), np.float32)
    records = read_log(tmp_path / "metrics.jsonl")
    (evaluation,) = [record for record in records if "eval_loss" in record]
    labels, predicted = seen.labels, seen.logits.argmax(-1)
    for name, score in (("precision", precision_score), ("recall", recall_score)):
        expected = score(labels, predicted, labels=range(6), average=None, zero_division=0)
        np.testing.assert_allclose([evaluation[f"{name}_{label}"] for label in range(6)], expected, rtol=1e-12)
    shifted = np.exp(seen.logits - seen.logits.max(1, keepdims=True), dtype=np.float64)
    worst = np.argsort((shifted / shifted.sum(1, keepdims=True))[np.arange(23), labels])[:8]
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "worst.png")), np.concatenate(seen.images[worst], axis=1))
    by_tensor = [record for record in records if "gradient_norm/net/kernel" in record]
    assert [record["step"] for record in by_tensor] == [1, 11]
    for record in by_tensor:
        norms = [value for name, value in record.items() if name.startswith("gradient_norm/")]
        assert np.linalg.norm(norms) == pytest.approx(record["gradient_norm"], rel=1e-5)


def test_time_limit_of_the_page_ends_saved_and_the_run_resumes(rare, tmp_path):
    limit = examples_of_the_page()["TimeLimit"]
    with pytest.raises(Stopped, match="stopped by the limit of 0 minutes"):
        train(rare, tmp_path / "run", callbacks=[limit(0)])
    assert 0 < next(read_manifests(tmp_path / "run/checkpoints")).samples < 160
    train(rare, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome_of_whole_run(rare)


class Replaces(Callback):
    def before_step(self, run, batch):
        if run.progress.steps == 5:
            run.state = run.state._replace(params=jax.tree.map(jax.numpy.zeros_like, run.state.params))


class ReplacesAtStart(Callback):
    def on_start(self, run):
        run.state = run.state._replace(params=jax.tree.map(jax.numpy.zeros_like, run.state.params))


class Edits(Callback):
    def after_step(self, run, metrics):
        if metrics["step"] == 5:
            run.state.params["net"]["bias"] = jax.numpy.zeros_like(run.state.params["net"]["bias"])


class ReplacesConfig(Callback):
    def after_step(self, run, metrics):
        if metrics["step"] == 5:
            run.config = dataclasses.replace(run.config, seed=1)


@pytest.mark.parametrize("callback", [Replaces, ReplacesAtStart, Edits, ReplacesConfig])
def test_freezing_by_a_callback_is_refused_with_what_to_use_and_changes_nothing(rare, tmp_path, callback):
    with pytest.raises(TrainingError, match=r"callbacks change nothing of the training: to freeze stages until an epoch, "):
        train(rare, tmp_path / "run", callbacks=[callback()])
    train(rare, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome_of_whole_run(rare)


OF_TWO_PROCESSES = """
import json, sys
sys.path.insert(0, "tests")
import jax
import numpy as np
import jaxdp

class Mine(jaxdp.Callback):
    calls = []

    def after_step(self, run, metrics):
        self.calls.append(metrics["step"])
        if metrics["step"] == 1:
            run.save()  # before step 3, which completes step 2
        if metrics["step"] == 2:
            run.evaluate()
        if metrics["step"] == 4:
            run.stop("four")

    def after_evaluation(self, run, evaluation):
        images, labels = run.datasets.evaluation.batch(np.arange(20), np.arange(20))
        logits, params = run.predict(images), run.params
        run.log(norm=float(sum(np.abs(np.asarray(leaf)).sum() for leaf in jax.tree.leaves(params))))
        with open(f"{sys.argv[1]}-{run.processes.rank}.json", "w") as file:
            json.dump([self.calls, logits.tolist(), evaluation["eval_loss"]], file)

jaxdp.train(jaxdp.load_config("tests/helpers/tiny_run.py", ["--mesh.cpu-devices", "2"]), sys.argv[1], callbacks=[Mine()])
"""


@pytest.mark.slow
def test_every_process_calls_the_same_methods_and_sees_the_same_predictions(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OF_TWO_PROCESSES)
    wait_for_exit(launch(2, None, command=[str(script), str(tmp_path / "run")], environment={"PYTHONPATH": str(ROOT)}))
    seen = [json.loads((tmp_path / f"run-{rank}.json").read_text()) for rank in (0, 1)]
    assert seen[0] == seen[1]
    assert seen[0][0] == [1, 2, 3, 4, 5]
    log = read_log(tmp_path / "run/metrics.jsonl")
    assert [record["step"] for record in log if "eval_loss" in record] == [3, 5]
    assert log[-1]["norm"] > 0
