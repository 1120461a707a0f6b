import math
from fractions import Fraction

import numpy as np
import optax
import pytest

from jaxdp import schedules
from jaxdp.config import Phase


def test_cosine_equals_optax():
    reference = optax.warmup_cosine_decay_schedule(0.1, 3.0, 50, 900, 0.02)
    for step in (0, 1, 25, 49, 50, 51, 300, 899, 900):
        ours = schedules.cosine(step / 10, 90, 3.0, warmup_epochs=5, start=0.1, end=0.02)
        assert ours == pytest.approx(float(reference(step)), rel=1e-5)


@pytest.mark.parametrize(
    ("epoch", "value"), [(0, 1e-5), (17, 17.000005), (34, 34.0), (60, 9.757653), (75, 2.439413), (90, 0.0)]
)
def test_polynomial_has_the_known_values_of_the_papers_configuration_a(epoch, value):
    ours = schedules.polynomial(epoch, 90, 34.0, warmup_epochs=34, start=1e-5, end=0.0, power=2.0)
    assert ours == pytest.approx(value, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("epoch", "batch", "value"),
    [
        (0, 8192, 0.1),
        (2.5, 8192, 1.65),
        (5, 8192, 3.2),
        (29.99, 8192, 3.2),
        (30, 8192, 0.32),
        (60, 8192, 0.032),
        (80, 8192, 0.0032),
        (0, 256, 0.1),
        (40, 256, 0.01),
        (10, 512, 0.2),
    ],
)
def test_goyal_has_the_values_printed_in_the_paper(epoch, batch, value):
    assert schedules.goyal(epoch, batch) == pytest.approx(value, rel=1e-12)


def test_rates_are_computed_in_float64():
    assert schedules.cosine(1e-9, 90, 1.0, warmup_epochs=5) == pytest.approx(2e-10, rel=1e-12)
    assert isinstance(schedules.polynomial(3, 90, 1.0), float)


@pytest.mark.parametrize("examples", [1437, 1_281_167, 100])
@pytest.mark.parametrize("borders", [(1.5, 4.0), (0.1, 0.2, 3.0), (0.3,)])
def test_phases_follow_from_stepping_one_batch_at_a_time(examples, borders):
    """The reference walks: a phase begins at the first step whose samples seen reach the end of the one before."""
    batches = (96, 4096, 1000)[: len(borders)]
    phases = tuple(Phase(b, until_epoch=e) for b, e in zip(batches, borders, strict=True))
    seen, expected = 0, []
    for phase in phases:
        first, steps = seen, 0
        while Fraction(seen) < Fraction(str(phase.until_epoch)) * examples:
            seen, steps = seen + phase.global_batch, steps + 1
        expected.append((first, steps))
    assert schedules.phase_steps(phases, borders[-1], examples) == expected


def test_an_epoch_written_as_a_decimal_counts_as_that_decimal():
    assert schedules.samples_until(0.1, 1000) == 100  # 0.1 in binary times 1000 is above 100
    assert schedules.samples_until(0.3, 10) == 3
    assert schedules.samples_until(1.0001, 10) == math.ceil(10.001)


def test_the_rate_is_a_function_of_samples_whatever_the_batch():
    from jaxdp.config import Schedule

    schedule = Schedule(name="polynomial", learning_rate=3.0, warmup_epochs=1.0)
    values = {schedules.learning_rate(schedule, 10.0, 4.0, batch) for batch in (32, 256, 8192)}
    assert len(values) == 1
    np.testing.assert_allclose(values.pop(), 3.0 * (1 - 3 / 9) ** 2)


@pytest.mark.parametrize(
    ("epoch", "value"),
    [(0, 0.2), (2.5, 14.6), (5, 25.867284), (30, 22.222222), (60, 5.555556), (75, 1.388889), (90, 0.0)],
)
def test_sony_b_has_the_known_values_with_both_jumps(epoch, value):
    assert schedules.sony_b(epoch) == pytest.approx(value, abs=5e-7)


def test_sony_b_before_its_jumps():
    assert schedules.sony_b(5 - 1e-9) == pytest.approx(29.0, abs=1e-6)
    assert schedules.sony_b(30 - 1e-9) == pytest.approx(12.888889, abs=5e-7)
    assert schedules.sony_b(30 - 1e-9, boundaries=()) == pytest.approx(schedules.sony_b(30, boundaries=()), abs=1e-6)


@pytest.mark.parametrize(("epoch", "value"), [(17, 17.000005), (34, 34.0), (60, 9.757653), (75, 2.439413)])
def test_sony_a_has_the_known_values(epoch, value):
    assert schedules.sony_a(epoch, end=0.0) == pytest.approx(value, rel=1e-6)


MOMENTA = {
    32768: (0.9, 0.9),
    34816: (0.905882, 0.893750),
    55296: (0.940741, 0.831250),
    65536: (0.95, 0.8),
    69632: (0.952941, 0.787500),
    87040: (0.962353, 0.734375),
    121856: (0.973109, 0.628125),
}


@pytest.mark.parametrize("batch", MOMENTA)
def test_momentum_follows_the_batch_as_tabulated(batch):
    by_noise, printed = MOMENTA[batch]
    assert schedules.momentum("noise_scale", 0.9, batch, 32768) == pytest.approx(by_noise, abs=5e-7)
    assert schedules.momentum("as_printed", 0.9, batch, 32768) == pytest.approx(printed, abs=5e-7)
    assert schedules.momentum("constant", 0.9, batch, 32768) == 0.9
