"""Early stopping: where a run ends, which checkpoint is its result, and that interruptions change neither."""

import dataclasses
import json
import math

import pytest
from helpers.runs import Recorder, outcome, read_records, train_shown, train_until, without_timing
from helpers.step import with_parts
from hypothesis import given
from hypothesis import strategies as st

import jaxdp
from jaxdp import ConfigError, train
from jaxdp.callbacks.early_stopping import update
from jaxdp.checkpoint.listing import checkpoint_paths
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.checkpoint.manifest import read_manifest
from jaxdp.checkpoint.progress import Progress
from jaxdp.config import Checkpoint, Model, Phase, Stop
from jaxdp.inference.checkpoints import choose_checkpoint
from jaxdp.training import loop

SIGNS = {"eval_accuracy": 1, "eval_top5": 1, "eval_loss": -1}


def expected(values, sign, *, patience):
    """(index of the evaluation that ends the run, or None; index of the best up to it, or None), from the whole series."""
    improving, last = [], len(values) - 1
    for index, value in enumerate(values):
        if math.isfinite(value) and (not improving or sign * (value - values[improving[-1]]) > 0):
            improving.append(index)
        if index - (improving or [-1])[-1] >= patience:
            last = index
            break
    finite = [index for index in range(last + 1) if math.isfinite(values[index])]
    stops = last - (improving or [-1])[-1] >= patience
    return last if stops else None, max(finite, key=lambda index: (sign * values[index], index), default=None)


@given(
    st.sampled_from(list(SIGNS)),
    st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.5, 0.9, math.nan, math.inf]), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_run_ends_after_patience_evaluations_that_do_not_improve(metric, values, patience):
    progress = Progress()
    last = None
    for index, value in enumerate(values):
        update(progress, metric, {"samples": index, metric: value})
        best = None if progress.best is None else progress.best["samples"]
        assert best == expected(values[: index + 1], SIGNS[metric], patience=99)[1]
        if progress.not_improved >= patience:
            last = index
            break
    assert (last, best) == expected(values, SIGNS[metric], patience=patience)


@pytest.fixture
def noisy(tiny):
    """Twenty evaluations in eight epochs; accuracy and loss get better and worse several times."""
    batch = (Phase(8, 1.5, per_worker_batch=2), Phase(16, per_worker_batch=2))
    config = dataclasses.replace(tiny, epochs=8.0, batch=batch)
    return with_parts(config, evaluation={"every_epochs": 0.4}, checkpoint={"every_epochs": None, "keep": 1})


def with_stop(config, **stop):
    return dataclasses.replace(config, stop=Stop(**stop))


def evaluations(workdir):
    return [record for record in read_records(workdir) if "eval_loss" in record]


def arrays(workdir, samples):
    return read_manifest(workdir / f"checkpoints/{samples}").arrays


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "optimizer", "phase"),
    [(("eval_loss", 6), {}, 1), (("eval_accuracy", 3), {"average_decay": 0.7}, 0)],
)
def test_stopped_run_begins_as_the_whole_run_and_its_result_is_the_best_checkpoint(noisy, tmp_path, stop, optimizer, phase):
    """The runs accumulate gradients. The learning rate follows the whole schedule. phase: where the run ends."""
    metric, patience = stop
    noisy = with_parts(noisy, optimizer=optimizer)
    train(dataclasses.replace(noisy, checkpoint=Checkpoint(every_epochs=0.1, keep=99)), tmp_path / "whole")
    whole = evaluations(tmp_path / "whole")
    values = [record[metric] for record in whole]
    last, best = expected(values, SIGNS[metric], patience=patience)

    workdir = tmp_path / "stopped"
    result = train(with_stop(noisy, metric=metric, patience=patience), workdir)
    assert (result.samples, result.best_samples, result.stopped_early) == (whole[last]["samples"], whole[best]["samples"], True)
    assert jaxdp.plan(noisy).phase_before(result.samples).index == phase
    assert (result.accuracy, result.loss) == (whole[best]["eval_accuracy"], whole[best]["eval_loss"])
    records = [without_timing(record) for record in read_records(workdir)]
    assert records == [without_timing(record) for record in read_records(tmp_path / "whole")][: len(records)]
    kept = {result.samples, result.best_samples}
    assert {int(path.name) for path in checkpoint_paths(workdir / "checkpoints")} == kept
    for samples in kept:
        assert arrays(workdir, samples) == arrays(tmp_path / "whole", samples)
    assert choose_checkpoint(workdir).samples == choose_checkpoint(workdir, "best").samples == result.best_samples
    assert choose_checkpoint(workdir, "newest").samples == result.samples


LOSS = {"metric": "eval_loss", "patience": 6}  # best at 272, ends at 384


def test_resume_after_kills_ends_at_the_same_sample_with_the_same_parameters(noisy, tmp_path):
    config = with_stop(noisy, **LOSS)
    result = train(config, tmp_path / "whole")
    assert (result.best_samples, result.samples) == (272, 384)
    for cut in ({"evaluated": 272}, {"step": 26}):
        train_until(config, tmp_path / "cut", **cut)
    train(config, tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()  # a kill before it is written
    screen = Recorder()
    train_shown(config, tmp_path / "cut", screen=screen)
    assert any("checkpoints/384" in line for line in screen.lines)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    assert arrays(tmp_path / "cut", 272) == arrays(tmp_path / "whole", 272)


def test_stopped_run_is_not_continued_by_the_same_command_but_with_more_patience(noisy, tmp_path):
    config = with_stop(noisy, **LOSS)
    first = train(config, tmp_path / "run")
    assert train(config, tmp_path / "run") == first
    patient = with_stop(noisy, metric="eval_loss", patience=7)
    with pytest.raises(ConfigError, match=r"different run \(stop.patience: 6 -> 7\).*--accept-changes"):
        train(patient, tmp_path / "run")
    train(patient, tmp_path / "run", accept_changes=True)
    whole = train(patient, tmp_path / "whole")
    assert (whole.samples, whole.stopped_early, whole.best_samples) == (400, False, 272)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_metric_that_is_not_finite_does_not_improve(noisy, tmp_path, monkeypatch):
    calls, evaluate = [], loop.evaluate

    def nan_from_the_third_on(*arguments, **options):
        calls.append(evaluate(*arguments, **options))
        return calls[-1] | ({"eval_loss": math.nan} if len(calls) > 2 else {})

    monkeypatch.setattr(loop, "evaluate", nan_from_the_third_on)
    result = train(with_stop(noisy, metric="eval_loss", patience=4), tmp_path)
    assert (result.samples, result.best_samples) == (112, 24)  # the fifth evaluation; the second is finite, and worse
    assert math.isfinite(result.loss)
    assert json.loads((tmp_path / "result.json").read_text())["loss"] == result.loss
    assert choose_checkpoint(tmp_path).samples == 24


def test_top5_accuracy_of_five_classes_raises_one_line(tiny):
    stop = Stop(metric="eval_top5", patience=1)
    config = dataclasses.replace(tiny, stop=stop, model=Model(name="normalized_linear", classes=5))
    message = r"stop\.metric='eval_top5': with 5 classes, every image is among the five"
    with pytest.raises(ConfigError, match=message) as error:
        jaxdp.plan(config)
    assert "\n" not in str(error.value)


def test_run_saves_the_best_evaluations_and_its_summary_states_the_best(noisy, tmp_path, monkeypatch):
    saved, save = [], CheckpointManager.save

    def record(manager, state, samples, *arguments, **options):
        saved.append(samples)
        save(manager, state, samples, *arguments, **options)

    monkeypatch.setattr(CheckpointManager, "save", record)
    screen = Recorder()
    train_shown(with_stop(noisy, metric="eval_accuracy", patience=2), tmp_path, screen=screen)
    assert saved == [24, 40, 80]  # not 64; 80 is the end of a phase and of the run
    summary = next(line for line in screen.lines if line.startswith("accuracy "))
    assert summary.endswith("held-out images)  at epoch 0.8, of the best checkpoint")
    assert "trained for 1.6 epochs, 10 steps; stopped early: eval_accuracy did not improve for 2 evaluations" in screen.lines
    assert not any("cannot stop early" in line for line in screen.lines)
