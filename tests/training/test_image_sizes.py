"""Progressive resizing: phases whose training images have different sizes."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.linear import PooledLinear
from helpers.runs import Recorder, outcome, outcome_of_whole_run, train_shown, train_until

import jaxdp
from jaxdp import ConfigError, register_model, train
from jaxdp.analysis.memory import estimate
from jaxdp.checkpoint.listing import latest_valid
from jaxdp.config import Mesh, Model, Phase
from jaxdp.planning import make_plan
from jaxdp.sizes import model_summary
from jaxdp.training.step_compiler import StepCompiler


@pytest.fixture
def growing(tiny):
    """Images of 8x8 for one epoch and a half, then of 16x16, in batches of the same size."""
    register_model("pooled_linear", PooledLinear)
    return dataclasses.replace(
        tiny, model=Model(name="pooled_linear", classes=6), batch=(Phase(8, 1.5, image_size=8), Phase(8))
    )


def test_phases_of_two_image_sizes_equal_two_runs_of_one_size_each(growing, tmp_path):
    """A run on 8x8 images, resumed from the end of its first phase on 16x16 ones. Evaluation has one size in both."""
    small = dataclasses.replace(growing, data=dataclasses.replace(growing.data, image_size=8))
    small = dataclasses.replace(small, batch=(Phase(8, 1.5), Phase(8)))
    train_until(small, tmp_path, step=11)
    assert latest_valid(tmp_path / "checkpoints").samples == 80
    large = dataclasses.replace(growing, batch=(Phase(8, 1.5), Phase(8)))
    train(large, tmp_path, accept_changes=True)
    assert outcome(tmp_path)[2:] == outcome_of_whole_run(growing)[2:]


@pytest.mark.slow
def test_resume_across_a_change_of_size_equals_an_uninterrupted_run(growing, tmp_path):
    growing = dataclasses.replace(growing, data=dataclasses.replace(growing.data, augmentation="paper"))
    for step in (4, 10, 11):
        train_until(growing, tmp_path, step=step)
    train(growing, tmp_path)
    assert outcome(tmp_path) == outcome_of_whole_run(growing)


def test_the_first_gradient_is_that_of_the_first_image_size(growing):
    small = dataclasses.replace(growing, data=dataclasses.replace(growing.data, image_size=8), batch=(Phase(8),))
    jax.tree.map(np.testing.assert_array_equal, jaxdp.first_gradient(growing), jaxdp.first_gradient(small))


def test_memory_is_that_of_the_phase_that_needs_most(growing):
    config = dataclasses.replace(growing, batch=(Phase(32, 1.0, image_size=8), Phase(16)), mesh=Mesh(cpu_devices=1))
    of_two = estimate(make_plan(config, examples=50, devices=1), model_summary(config))
    alone = dataclasses.replace(config, batch=(Phase(16),))
    of_one = estimate(make_plan(alone, examples=50, devices=1), model_summary(alone))
    assert of_two["activations"] == of_one["activations"]  # 16 images of 16x16 are larger than 32 of 8x8


def test_programs_of_a_later_image_size_are_requested_once_the_first_step_is_complete(growing, tmp_path, monkeypatch):
    events, prepare = [], StepCompiler.prepare_train
    monkeypatch.setattr(
        StepCompiler, "prepare_train", lambda self, phase: events.append(phase.image_size) or prepare(self, phase)
    )
    screen = Recorder()
    screen.step = lambda record: events.append("step")
    train_shown(growing, tmp_path, screen=screen)
    first = events.index("step")
    assert 16 not in events[:first]  # it would delay the first step
    assert 16 in events[first : events.index("step", first + 1)]


def test_a_network_for_one_image_size_refuses_another(growing):
    config = dataclasses.replace(growing, model=Model(name="normalized_linear", classes=6))
    with pytest.raises(ConfigError, match=r"^batch\.0\.image_size=8: normalized_linear cannot take images of another size"):
        model_summary(config)
