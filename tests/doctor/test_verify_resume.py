"""The proof of resuming."""

import jax
import pytest

from jaxdp.config import Compile
from jaxdp.doctor import verify_resume
from jaxdp.training import trainer


@pytest.mark.slow
def test_proof_of_a_resumed_run_with_other_parameters_fails(tiny, monkeypatch):
    restore_or_initialize = trainer.restore_or_initialize

    def restore_other_parameters(*args, **kwargs):
        state, timer = restore_or_initialize(*args, **kwargs)
        if timer.progress.sessions > 1:
            state = state._replace(params=jax.tree.map(lambda p: p * (1 + 1e-6), state.params))
        return state, timer

    monkeypatch.setattr(trainer, "restore_or_initialize", restore_other_parameters)
    proof = verify_resume.proof(4, 4, compile=Compile())
    assert proof.passed is False
    assert proof.difference > 0
