"""Smaller networks, and runs that end before their first step."""

import numpy as np
import pytest
from helpers.runs import Interrupted, Recorder, train_shown

from jaxdp.models import resnet
from jaxdp.models.weights import named_tensors
from jaxdp.session import train
from jaxdp.training.step_compiler import StepCompiler


@pytest.fixture
def two_blocks(monkeypatch):
    """Reduce ResNet-18 and ResNet-50 to two blocks."""
    monkeypatch.setitem(resnet.BLOCKS, 18, (1, 1))
    monkeypatch.setitem(resnet.BLOCKS, 50, (1, 1))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that starts a run; returns its tensors before the first step and the line about them."""

    def cut(run, *_):
        states.append(run.state)
        raise Interrupted

    monkeypatch.setattr(train, "train_phase", cut)
    monkeypatch.setattr(StepCompiler, "prepare_train", lambda *_: None)
    states = []

    def start(config, **options):
        screen, number = Recorder(), len(states)
        with pytest.raises(Interrupted):
            train_shown(config, tmp_path / f"run-{number}", screen=screen, **options)
        found = {name: np.asarray(leaf) for name, leaf in named_tensors(states[-1].params, states[-1].batch_stats).items()}
        return found, "".join(text for text in screen.lines if "starting from" in text)

    return start
