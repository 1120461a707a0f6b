"""Checks of a registered all-reduce strategy before training."""

import dataclasses

import pytest
from helpers.runs import train_shown
from jax import lax

from jaxdp import register_strategy
from jaxdp.config import Reduce
from jaxdp.errors import ConfigError
from jaxdp.loggers.console import Screen


def test_registered_strategy_that_does_not_sum_over_all_devices_is_refused_before_training(tiny, tmp_path):
    register_strategy("rows_only", lambda vector: lax.psum(vector, "horizontal"))
    config = dataclasses.replace(tiny, reduce=Reduce(strategy="rows_only"))
    with pytest.raises(ConfigError, match=r"reduce.strategy='rows_only': its stages do not return the sum over all devices"):
        train_shown(config, tmp_path / "run", screen=Screen(quiet=True))
    assert not list((tmp_path / "run").glob("checkpoints/*"))
