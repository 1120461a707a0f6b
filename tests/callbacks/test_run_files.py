"""When checkpoints are saved, and which one is the latest."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.checkpoints import metadata, replicate

from jaxdp.callbacks import run_files
from jaxdp.callbacks.run_files import CheckpointInterval
from jaxdp.checkpoint import listing
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.config import Checkpoint
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training import ending


@pytest.fixture
def run(monkeypatch):
    """Rank 0 of two processes after 16 samples: a save every minute, the first of them overdue. `requests` counts its requests
    to the other processes, `saves` its own."""
    run = SimpleNamespace(requests=0, saves=0, agreed=False, is_rank0=True, saved_samples=None, saved_at=0.0, epoch=0.16)

    def request_save():
        run.requests += 1
        return False

    def take_agreed_save():
        agreed, run.agreed = run.agreed, False
        return agreed

    def save():
        run.saves += 1

    intervals = SimpleNamespace(every_minutes=1.0, every_epochs=None)
    run.config, run.plan = SimpleNamespace(checkpoint=intervals), SimpleNamespace(examples=100)
    run.progress, run.resume_action = SimpleNamespace(samples=8), "the same command"
    run.processes = SimpleNamespace(request_save=request_save, take_agreed_save=take_agreed_save)
    run.save = save
    monkeypatch.setattr(run_files.time, "monotonic", lambda: 61.0)
    return run


@pytest.fixture
def interval(run):
    """The callback after the step to 16 samples."""
    callback = CheckpointInterval()
    callback.on_start(run)
    run.progress.samples = 16
    return callback


def test_overdue_save_is_requested_from_all_processes_once_until_it_is_saved(run, interval):
    """The answer comes two steps later; a second request made a second save."""
    interval.before_step(run, {})
    interval.before_step(run, {})
    assert (run.requests, run.saves) == (1, 0)
    run.saved_at = 0.5
    interval.before_step(run, {})
    assert run.requests == 2


def test_agreed_save_is_not_requested_again(run, interval):
    """A second request made a second save, two steps after the first."""
    run.agreed = True
    interval.before_step(run, {})
    assert (run.requests, run.saves) == (0, 1)


def test_state_that_was_saved_at_the_end_of_a_phase_uses_up_the_agreement(run, interval):
    run.agreed, run.saved_samples = True, 16
    interval.before_step(run, {})
    assert (run.agreed, run.saves) == (False, 0)


@pytest.mark.parametrize(("samples", "saves"), [(15, 0), (16, 1), (17, 1)])
def test_interval_is_counted_from_the_last_step_seen(run, samples, saves):
    run.config.checkpoint.every_epochs, run.saved_at = 0.16, 61.0  # of 100 images
    callback = CheckpointInterval()
    callback.on_start(run)
    run.progress.samples = samples
    callback.before_step(run, {})
    callback.before_step(run, {})
    assert run.saves == saves


@pytest.mark.parametrize(("is_rank0", "verified"), [(True, 1), (False, 0)])
def test_describe_latest_verifies_files_on_rank_0_only(run, tmp_path, monkeypatch, is_rank0, verified):
    manager = CheckpointManager(tmp_path, Checkpoint(), print)
    manager.save(replicate(make_mesh(1, 1), x=np.zeros(3)), 10, metadata(10))
    calls, verify_files = [], listing.verify_files
    monkeypatch.setattr(
        listing, "verify_files", lambda manifest, *more: calls.append(manifest) or verify_files(manifest, *more)
    )
    run.checkpoints, run.is_rank0 = manager, is_rank0
    described = ending.describe_latest(run)
    assert re.search(rf"checkpoint is {tmp_path / '10'} \(epoch 0.10\); the same command continues from it$", described)
    assert len(calls) == verified
