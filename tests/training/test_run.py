"""What callbacks and the loop may ask a run for, without the loop."""

from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.step import PIXELS, with_parts

from jaxdp import models
from jaxdp.data.augment import normalize
from jaxdp.data.prefetch import BatchRows, load_images
from jaxdp.data.sources import open_datasets
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import make_plan
from jaxdp.run_records import RECORD_FIELDS
from jaxdp.targets import UNUSABLE
from jaxdp.training import run as module
from jaxdp.training.run import Run, open_batches
from jaxdp.training.state import create_state


@pytest.fixture
def run_of(tmp_path):
    """A function that makes the run of a plan on four devices; `calls` counts barriers and reports of progress."""
    made = []

    def make(config, plan=None):
        datasets, model, mesh, calls = open_datasets(config), models.create(config.model), make_mesh(2, 2), Counter()
        gradient = Future()
        gradient.set_result(lambda *arguments: arguments)
        compiler = SimpleNamespace(
            **{"plan": plan or make_plan(config, examples=50, devices=4), "model": model, "images": None},
            **{"devices": [*mesh.devices.flat], "mesh": lambda phase: mesh, "evaluation_rows": lambda phase: (10, 12)},
            **{"prepare_gradient": lambda phase: gradient, "hyperparameters": lambda phase, rate: (phase.index, rate)},
        )
        status = SimpleNamespace(record_progress=lambda: calls.update(["progress"]))
        group = SimpleNamespace(is_rank0=True, status=status, barrier=lambda name: calls.update([name]))
        train_at = {16: datasets.train}.__getitem__
        data = SimpleNamespace(train_at=train_at, evaluation=datasets.evaluation, mean=PIXELS[0], std=PIXELS[1])
        callbacks = SimpleNamespace(call=lambda hook, run, argument: argument(run))
        run = Run(
            *(compiler, data, tmp_path),
            **{"data_fingerprint": {}, "location": "here", "signals": SimpleNamespace(group=group), "checkpoints": None},
            **{"callbacks": callbacks, "info": print, "status": print, "resume_action": "", "started": 0.0},
        )
        run.calls = calls
        made.append(run)
        return run

    yield make
    for run in made:
        run.clock.close()


def test_a_run_begins_before_its_first_step_in_its_first_phase(tiny, run_of):
    run = run_of(tiny)
    assert (run.position(), run.phase, run.epoch, run.saved_samples) == ({}, run.plan.phases[0], 0.0, None)
    assert (run.step_times, run.is_logged, run.save_requested, run.request_step) == ((0.0, 0.0), False, False, 0)
    assert run.devices == jax.devices()[:4]
    run.has_started, run.progress.samples, run.progress.sessions = True, 75, 3
    assert run.epoch == 1.5
    position = run.position()
    assert position.pop("wall_seconds") > 0
    assert position == {"samples": 75, "sessions": 3}
    run.save()
    assert run.save_requested


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [(10**6, None, 10), (200, None, 10), (199, None, 9), (40, None, 2), (39, None, 1), (1, None, 1), (200, 3, 3), (10, 30, 30)],
)
def test_ten_steps_are_logged_as_one_or_fewer_in_a_run_of_less_than_200(tiny, run_of, steps, every, expected):
    """As the reference of `logging.every_steps` says."""
    config = with_parts(tiny, logging={"every_steps": every})
    plan = SimpleNamespace(total_steps=steps, config=config, phases=[None])
    assert run_of(config, plan).log_every == expected


@pytest.mark.parametrize("images", [1, 3, 4, 9])
def test_predictions_of_any_number_of_images_are_the_network_s(tiny, run_of, images):
    run = run_of(tiny)
    run.state = create_state(tiny, run.model, run.mesh)
    inputs, labels = run.datasets.evaluation.batch(np.arange(23), np.arange(23))
    expected = run.model.apply(*run.eval_variables, normalize(inputs, *PIXELS), train=False)[0]
    found = run.predict(inputs[:images])
    assert (type(found), found.shape) == (np.ndarray, (images, 6))
    np.testing.assert_allclose(found, expected[:images], rtol=1e-5, atol=1e-6)
    if images == 9:
        held_out = run.predict_held_out()
        np.testing.assert_array_equal(held_out.positions, np.arange(23))
        np.testing.assert_array_equal(held_out.labels, labels)
        np.testing.assert_allclose(held_out.logits, expected, rtol=1e-5, atol=1e-6)
        assert run.calls["progress"] == 3  # batches of ten images


def test_unreadable_images_are_no_held_out_predictions(tiny, run_of, monkeypatch):
    run = run_of(tiny)
    run.state = create_state(tiny, run.model, run.mesh)
    source, read = run.datasets.evaluation, run.datasets.evaluation.batch

    def batch(indices, positions):
        images, labels = read(indices, positions)
        return images, np.where(positions == 3, UNUSABLE, labels)

    monkeypatch.setattr(source, "batch", batch, raising=False)
    assert [*run.predict_held_out().positions] == [number for number in range(23) if number != 3]


def test_the_gradient_is_the_one_of_the_next_step(tiny, run_of):
    run = run_of(tiny)
    run.state, run.progress.samples = "state", 25
    assert run.gradient({"labels": 1}) == ("state", {"labels": 1}, (0, run.plan.learning_rate(25)))
    assert run.calls == {"a gradient": 1}


@pytest.mark.parametrize(
    ("value", "logged"),
    [(2**63 - 1, int), (-(2**63) + 1, int), (2**63, float), (-(2**63), float), (True, bool), (np.float32(0.5), float)],
    ids=str,
)
def test_integers_that_a_signed_number_of_64_bits_holds_stay_exact_in_the_log(tiny, run_of, value, logged):
    run, record = run_of(tiny), {}
    with pytest.raises(ValueError, match=r"log\(\) adds to a record"):
        run.log(mine=value)
    assert run.call_hook("after_step", record, lambda run: run.log(mine=value))
    assert (record, type(record["mine"])) == ({"mine": value}, logged)
    assert not run.call_hook("after_step", record, lambda run: None)
    assert run.record is None


@pytest.mark.parametrize("field", [*RECORD_FIELDS, "top5", "examples", "request", "run", "own"])
def test_no_field_of_a_record_can_be_logged_again(tiny, run_of, field):
    run, record = run_of(tiny), {"own": 1}
    for hook in (lambda run: run.log(**{field: 1.0}), lambda run: run.log(fine=2.0, **{field: 1.0})):
        with pytest.raises(ValueError, match=rf"log\({field}=1\.0\)"):
            run.call_hook("after_step", record, hook)
    assert record == {"own": 1}


def test_hooks_within_a_hook_keep_what_the_outer_one_logs_and_asks_for(tiny, run_of):
    """As an audit before a step, which completes the steps before."""
    run, outer, inner = run_of(tiny), {}, {}

    def within(run):
        assert (run.is_logged, run.request_step) == (False, 0)
        run.log(inner=1)
        run.evaluate()
        run.stop("the inner one")

    def around(run):
        assert not run.call_hook("after_step", {}, lambda run: None)
        assert run.call_hook("after_evaluation", inner, within)
        assert (run.is_logged, run.request_step) == (False, 7)
        assert (run.progress.evaluation_step, run.progress.stop_step, run.stop_reason) == (0, 1, "the inner one")
        run.log(outer=2)

    assert run.call_hook("before_step", outer, around, request_step=7)
    assert (outer, inner, run.request_step) == ({"outer": 2}, {"inner": 1}, 0)
    assert run.call_hook("after_step", outer, lambda run: None, is_logged=True)


@pytest.mark.parametrize("step", [0, 1, 2, 9])
def test_stop_ends_the_run_after_the_step_that_follows_but_not_before_the_first(tiny, run_of, step):
    run = run_of(tiny)
    run.call_hook("after_step", {}, lambda run: run.stop("red \x1b[31m"), request_step=step)
    assert (run.progress.stop_step, run.progress.stop_reason) == (max(step, 1), r"red \x1b[31m")


@pytest.mark.parametrize(("first", "resident"), [(0, False), (24, False), (40, True)])
def test_batches_of_a_phase_are_those_of_the_sampler_from_the_samples_seen_on(tiny, run_of, monkeypatch, first, resident):
    """In chunks of the rows that host memory has room for; resident images are not copied, so they need no chunks."""
    run, options = run_of(with_parts(tiny, data={"repeats": 2})), {}
    phase, real = run.plan.phases[0], module.DeviceIterator
    run.compiler.images = np.zeros(1) if resident else None

    def iterator(*arguments, **more):
        options.update(more)
        return real(*arguments, **more)

    monkeypatch.setattr(module, "DeviceIterator", iterator)
    monkeypatch.setattr("jaxdp.data.prefetch.AHEAD_BYTES", 3 * 4 * 3 * 16 * 16)  # of three images for each device
    batches, found = open_batches(run.compiler, run.datasets, phase, **({"first": first} if first else {})), []
    try:
        while not resident and (batch := batches.next()) is not None:
            found.append(jax.device_get(batch))
    finally:
        batches.close()
    assert (options["chunk_rows"], options["resident"]) == (None if resident else 1, resident)
    assert resident or len(found) == (phase.end - first) // 8
    for number, batch in enumerate(found):
        rows = BatchRows.of_batch(np.arange(8), first=first + 8 * number, global_batch=8, repeats=2)
        expected = load_images(run.datasets.train_at(16), 0, rows)
        for name in batch.keys() & expected.keys():
            np.testing.assert_array_equal(batch[name], expected[name])
