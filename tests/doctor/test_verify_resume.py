"""The proof of resuming."""

import jax
import pytest

from jaxdp import session
from jaxdp.choices import OPTIMIZERS
from jaxdp.config import Compile, Config, Optimizer
from jaxdp.doctor import verify_resume
from jaxdp.planning import make_plan
from jaxdp.validation import validate


@pytest.mark.slow
def test_proof_of_a_resumed_run_with_other_parameters_fails(tiny, monkeypatch):
    restore_or_initialize = session.restore_or_initialize

    def restore_other_parameters(run, start):
        restore_or_initialize(run, start)
        if run.progress.sessions > 1:
            run.state = run.state._replace(params=jax.tree.map(lambda p: p * (1 + 1e-6), run.state.params))

    monkeypatch.setattr(session, "restore_or_initialize", restore_other_parameters)
    proof = verify_resume.proof(Config(), 4, 4)
    assert proof.passed is False
    assert proof.difference > 0


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_short_run_trains_with_the_recipe_s_optimizer_at_its_momentum(name):
    optimizer = Optimizer(name=name, momentum=0.95, momentum_rule="noise_scale", weight_decay=0.01)
    config = validate(verify_resume.short_run(Config(optimizer=optimizer), 4, 4))
    assert (config.optimizer.name, config.optimizer.weight_decay) == (name, 0.01)
    assert [phase.momentum for phase in make_plan(config, examples=48, devices=4).phases] == [0.95]


@pytest.mark.slow
def test_proof_with_another_optimizer_passes_and_names_it():
    config = Config(optimizer=Optimizer(name="adamw"), compile=Compile(deterministic=True))
    proof = verify_resume.proof(config, 4, 4)
    assert (proof.passed, proof.error) == (True, None)
    assert "steps of adamw against" in proof.comparison
