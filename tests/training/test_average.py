"""The average of parameters against the formula of timm's ModelEmaV3, in float64."""

import numpy as np
import pytest

from jaxdp.config import Optimizer
from jaxdp.training.state import Average, TrainState

DECAY, STEPS = 0.99, 1200  # timm's warm-up reaches this decay at step 1,000


def timm_average(values, use_warmup):
    """`ModelEmaV3.get_decay` and its update, as timm's train.py calls them: with steps counted from 1."""
    average, averages = 0.0, []
    for step in range(len(values)):
        decay = min(1 - (1 + step) ** (-2 / 3), DECAY) if use_warmup else DECAY
        average += (1 - (decay if step else 0.0)) * (values[step] - average)
        averages.append(average)
    return np.array(averages)


def unbiased_average(values):
    weights = DECAY ** np.arange(len(values))[::-1]
    return np.array([(weights[-n:] * values[:n]).sum() / weights[-n:].sum() for n in range(1, len(values) + 1)])


def our_averages(values, optimizer):
    zero = np.zeros((), np.float32)
    average, found = Average({"w": zero}, {}, zero), []
    for value in values:
        average = average.include({"w": np.float32(value)}, {}, optimizer)
        found.append(float(TrainState({"w": zero}, {}, (), average, ()).evaluated[0]["w"]))
    return found


@pytest.mark.parametrize("start", ["unbiased", "initial", "warmup"])
def test_average_is_that_of_its_formula(start):
    values = 3 + np.random.default_rng(0).normal(size=STEPS)
    expected = unbiased_average(values) if start == "unbiased" else timm_average(values, use_warmup=start == "warmup")
    found = our_averages(values, Optimizer(average_decay=DECAY, average_start=start))
    np.testing.assert_allclose(found, expected, rtol=2e-6)
