"""When checkpoints are saved."""

from types import SimpleNamespace

import pytest

from jaxdp.training import run_checkpoints
from jaxdp.training.run_checkpoints import RunCheckpoints


@pytest.fixture
def checkpoints(monkeypatch):
    """Of rank 0 of two processes: a save every minute, the first of them overdue. `requests` counts its requests."""
    made = object.__new__(RunCheckpoints)
    made.requests, made.agreed = 0, False

    def request(action):
        made.requests += 1
        return False

    def pop_save_agreement():
        agreed, made.agreed = made.agreed, False
        return agreed

    config = SimpleNamespace(every_minutes=1.0, every_epochs=None, every_samples=None)
    plan = SimpleNamespace(phases=[SimpleNamespace(end=1000)], examples=100)
    made.setup = SimpleNamespace(config=SimpleNamespace(checkpoint=config), plan=plan)
    made.group = SimpleNamespace(is_rank0=True, request=request)
    made.signals = SimpleNamespace(pop_save_agreement=pop_save_agreement)
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
