"""When checkpoints are saved, and which one is the latest."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.checkpoints import metadata, replicate

from jaxdp.checkpoint import listing
from jaxdp.checkpoint.manager import CheckpointManager
from jaxdp.config import Checkpoint
from jaxdp.loggers.console import Quiet
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training import run_checkpoints
from jaxdp.training.run_checkpoints import RunCheckpoints


@pytest.fixture
def checkpoints(monkeypatch):
    """Of rank 0 of two processes: a save every minute, the first of them overdue. `requests` counts its requests."""
    made = object.__new__(RunCheckpoints)
    made.requests, made.agreed, made.mirror = 0, False, None

    def request(action):
        made.requests += 1
        return False

    def take_agreed_save():
        agreed, made.agreed = made.agreed, False
        return agreed

    config = SimpleNamespace(every_minutes=1.0, every_epochs=None, every_samples=None)
    plan = SimpleNamespace(phases=[SimpleNamespace(end=1000)], examples=100)
    made.setup = SimpleNamespace(config=SimpleNamespace(checkpoint=config), plan=plan)
    made.group = SimpleNamespace(is_rank0=True, request=request)
    made.signals = SimpleNamespace(take_agreed_save=take_agreed_save)
    made.last_save = 0.0
    monkeypatch.setattr(run_checkpoints.time, "monotonic", lambda: 61.0)
    return made


def test_is_due_requests_an_overdue_save(checkpoints):
    assert not checkpoints.is_due(SimpleNamespace(end=1000), before=8, after=16)
    assert checkpoints.requests == 1


def test_is_due_does_not_request_again_when_the_processes_have_agreed(checkpoints):
    """A second request made a second save, two steps after the first."""
    checkpoints.agreed = True
    assert checkpoints.is_due(SimpleNamespace(end=1000), before=8, after=16)
    assert checkpoints.requests == 0


def test_is_due_at_the_end_of_a_phase_uses_up_the_agreement(checkpoints):
    checkpoints.agreed = True
    checkpoints.setup.plan.phases.append(SimpleNamespace(end=2000))
    assert checkpoints.is_due(checkpoints.setup.plan.phases[0], before=992, after=1000)
    assert not checkpoints.agreed


@pytest.mark.parametrize(("is_rank0", "verified"), [(True, 1), (False, 0)])
def test_describe_latest_verifies_files_on_rank_0_only(checkpoints, tmp_path, monkeypatch, is_rank0, verified):
    manager = CheckpointManager(tmp_path, Checkpoint(), print)
    manager.save(replicate(make_mesh(1, 1), x=np.zeros(3)), 10, metadata(10))
    calls, verify_files = [], listing.verify_files
    monkeypatch.setattr(
        listing, "verify_files", lambda manifest, *more: calls.append(manifest) or verify_files(manifest, *more)
    )
    checkpoints.manager, checkpoints.group.is_rank0 = manager, is_rank0
    checkpoints.screen = Quiet()
    described = checkpoints.describe_latest()
    assert re.search(rf"checkpoint is {tmp_path / '10'} \(epoch 0.10\); the same command continues from it$", described)
    assert len(calls) == verified
