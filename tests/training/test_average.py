"""The average of parameters against its formula, in float64."""

import numpy as np

from jaxdp.config import Optimizer
from jaxdp.training.state import Average, TrainState

DECAY, STEPS = 0.99, 1200


def test_average_weights_the_last_steps_most_and_its_weights_sum_to_one():
    values = 3 + np.random.default_rng(0).normal(size=STEPS)
    weights = DECAY ** np.arange(STEPS)[::-1]
    expected = [(weights[-n:] * values[:n]).sum() / weights[-n:].sum() for n in range(1, STEPS + 1)]
    zero = np.zeros((), np.float32)
    average, found = Average({"w": zero}, {}, zero), []
    for value in values:
        average = average.include({"w": np.float32(value)}, {}, Optimizer(average_decay=DECAY))
        found.append(float(TrainState({"w": zero}, {}, (), average, ()).evaluated[0]["w"]))
    np.testing.assert_allclose(found, expected, rtol=2e-6)
