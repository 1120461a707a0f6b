import dataclasses
import math
import re
from decimal import Decimal
from fractions import Fraction

import optax
import pytest

import jaxdp
from jaxdp import schedules
from jaxdp.config import Config, Phase, Schedule
from jaxdp.errors import ConfigError
from jaxdp.loggers.plan_table import _rates
from jaxdp.planning import interval_elapsed, make_plan, phase_steps, samples_until
from jaxdp.schedules import Position

SONY_B = Schedule("sony_b", 29.0, warmup_epochs=5.0, start=0.2, power=2.0, boundaries=(30.0,), factor=50 / 29)


def test_cosine_equals_optax():
    reference = optax.warmup_cosine_decay_schedule(0.1, 3.0, 50, 900, 0.02)
    schedule = Schedule("cosine", 3.0, warmup_epochs=5, start=0.1, end=0.02)
    for step in (0, 1, 25, 49, 50, 51, 300, 899, 900):
        ours = schedules.cosine(schedule, Position(step / 10, 90))
        assert ours == pytest.approx(float(reference(step)), rel=1e-5)


def test_registered_schedule_gets_the_epoch_in_float64():
    jaxdp.register_schedule("mine", lambda epoch: 0.1 + epoch / 3)
    config = jaxdp.load_config("digits", ["--schedule.name", "mine", "--epochs", "2"])  # shorter than the default warm-up
    plan = make_plan(config, examples=1437, devices=1)
    for samples in (0, 1, 777, 2000):
        assert plan.learning_rate(samples) == 0.1 + samples / 1437 / 3


@pytest.mark.parametrize(
    ("batch", "epochs"),
    [((Phase(100),), 2.5), ((Phase(64, until_epoch=0.9), Phase(1000)), 3.0), ((Phase(7, until_epoch=1.0), Phase(300)), 1.01)],
)
def test_registered_schedule_is_called_at_steps_alone(batch, epochs):
    """Also one that falls to zero at the end of the run and below it after; the plan shows the rate of the last step.

    A run that resumed from a checkpoint between these steps starts its last step before the plan's end, but after `epochs`.
    """
    called = []

    def rate(epoch):
        called.append(epoch)
        return 0.1 * (1 - epoch / epochs)

    jaxdp.register_schedule("mine", rate)
    plan = make_plan(Config(schedule=Schedule(name="mine"), batch=batch, epochs=epochs), examples=1437, devices=1)
    shown = _rates(plan, plan.phases[-1])
    starts, seen = set(), 0
    for phase in plan.phases:
        for _ in range(phase.steps):
            starts.add(seen / 1437)
            seen += phase.global_batch
    assert {0.0, max(starts)} <= set(called) <= starts
    assert shown.endswith(f"to {0.1 * (1 - max(starts) / epochs):.4g}")
    assert plan.learning_rate(plan.total_samples - 1) == 0


@pytest.mark.parametrize(
    ("rate", "reason"),
    [
        (lambda epoch: math.nan, "the registered function returned nan at epoch 0; must be from 0 to 1e+15"),
        (lambda epoch: 1 / epoch, "the registered function failed at epoch 0: ZeroDivisionError: "),
    ],
)
def test_registered_schedule_without_a_rate_is_refused_by_the_plan(rate, reason):
    jaxdp.register_schedule("mine", rate)
    with pytest.raises(ConfigError, match=rf"schedule\.name='mine': {re.escape(reason)}"):
        make_plan(Config(schedule=Schedule(name="mine")), examples=1437, devices=1)


def test_registered_schedule_refuses_fields_that_it_does_not_read():
    jaxdp.register_schedule("mine", lambda epoch: 0.1)
    with pytest.raises(ConfigError, match=r"schedule\.learning_rate=0\.5: not used with schedule\.name='mine'"):
        jaxdp.load_config("digits", ["--schedule.name", "mine", "--schedule.learning-rate", "0.5"])


@pytest.mark.parametrize(
    ("epoch", "value"), [(0, 1e-5), (17, 17.000005), (34, 34.0), (60, 9.757653), (75, 2.439413), (90, 0.0)]
)
def test_polynomial_with_configuration_a_has_the_papers_values(epoch, value):
    schedule = Schedule("polynomial", 34.0, warmup_epochs=34, start=1e-5, end=0.0, power=2.0)
    assert schedules.polynomial(schedule, Position(epoch, 90)) == pytest.approx(value, rel=1e-6, abs=1e-12)


def test_polynomial_with_another_power_is_that_of_the_rest_of_the_run():
    schedule = Schedule("polynomial", 2.0, warmup_epochs=10, end=0.5, power=3.0)
    assert schedules.polynomial(schedule, Position(40, 70)) == pytest.approx(0.5 + 1.5 * (1 - 30 / 60) ** 3)


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
        (0, 32, 0.0125),  # below the reference batch no warm-up leads down from the unscaled rate
        (2.5, 32, 0.0125),
        (5, 32, 0.0125),
    ],
)
def test_goyal_has_the_values_printed_in_the_paper(epoch, batch, value):
    schedule = Schedule("goyal", 0.1, warmup_epochs=5.0, boundaries=(30.0, 60.0, 80.0), factor=0.1)
    assert schedules.goyal(schedule, Position(epoch, 90, batch)) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("name", schedules.SCHEDULES.builtin)
def test_rate_without_warm_up_starts_at_its_peak_and_stays_at_its_last_value_after_the_run(name):
    schedule = Schedule(name, 2.0, warmup_epochs=0.0, end=0.5, boundaries=(3.0,), factor=0.25)
    rates = [schedules.SCHEDULES.implementation(name)(schedule, Position(epoch, 4.0)) for epoch in (0.0, 4.0, 5.0)]
    last = {"sony_b": 0.0}.get(name, 0.5)
    assert rates == [2.0, last, last]


def test_rates_are_computed_in_float64():
    schedule = Schedule(learning_rate=1.0, warmup_epochs=5)
    assert schedules.cosine(schedule, Position(1e-9, 90)) == pytest.approx(2e-10, rel=1e-12)
    assert isinstance(schedules.polynomial(schedule, Position(3, 90)), float)


def exact(epoch):
    """The decimal that is written for an epoch, as a fraction."""
    numerator, denominator = Decimal(str(epoch)).as_integer_ratio()
    return Fraction(numerator, denominator)


@pytest.mark.parametrize("batches", [(96, 4096, 1000), (4096, 1000, 96)])
@pytest.mark.parametrize("examples", [1437, 1_281_167, 100])
@pytest.mark.parametrize("borders", [(1.5, 4.0), (0.1, 0.2, 3.0), (0.3,)])
def test_phase_steps_equal_stepping_one_batch_at_a_time(examples, borders, batches):
    """The reference walks: a phase begins at the first step whose samples seen reach the end of the one before."""
    phases = tuple(Phase(b, until_epoch=e) for b, e in zip(batches, borders, strict=False))
    seen, expected = 0, []
    for phase in phases:
        first, steps, end = seen, 0, exact(phase.until_epoch) * examples
        while seen < end:
            seen, steps = seen + phase.global_batch, steps + 1
        expected.append((first, steps))
    assert phase_steps(phases, borders[-1], examples) == expected


# The products in float64 are 55000.00000000001, 7.000000000000001, 28.999999999999996 and 434.99999999999994.
@pytest.mark.parametrize(
    ("epoch", "examples", "samples"),
    [(1.1, 50_000, 55_000), (0.07, 100, 7), (0.29, 100, 29), (4.35, 100, 435), (1.0001, 10, 11)],
)
def test_an_epoch_counts_as_the_decimal_that_is_written(epoch, examples, samples):
    assert samples_until(epoch, examples) == samples == math.ceil(exact(epoch) * examples)
    steps = [(n - 1, n) for n in (samples - 1, samples, samples + 1)]
    reached = [interval_elapsed(epoch, unit=examples, before=before, after=after) for before, after in steps]
    assert reached == [False, True, False]


def test_an_interval_is_reached_once_for_each_multiple_in_a_step():
    def due(every, before, after):
        return interval_elapsed(every, unit=50, before=before, after=after)

    assert [n for n in range(1, 200) if due(0.7, n - 1, n)] == [35, 70, 105, 140, 175]
    assert (due(0.7, 0, 34), due(0.7, 34, 150), due(0.7, 35, 69), due(None, 0, 500)) == (False, True, False, False)


@pytest.mark.parametrize(
    ("epoch", "value"), [(0, 0.2), (2.5, 14.6), (5, 25.867284), (30, 22.222222), (60, 5.555556), (75, 1.388889), (90, 0.0)]
)
def test_sony_b_has_the_papers_values_with_both_jumps(epoch, value):
    assert schedules.sony_b(SONY_B, Position(epoch, 90)) == pytest.approx(value, abs=5e-7)


def test_sony_b_just_before_a_jump_has_the_value_without_it():
    without_jumps = dataclasses.replace(SONY_B, boundaries=())
    before, after = Position(30 - 1e-9, 90), Position(30, 90)
    assert schedules.sony_b(SONY_B, Position(5 - 1e-9, 90)) == pytest.approx(29.0, abs=1e-6)
    assert schedules.sony_b(SONY_B, before) == pytest.approx(12.888889, abs=5e-7)
    assert schedules.sony_b(without_jumps, before) == pytest.approx(schedules.sony_b(without_jumps, after), abs=1e-6)


MOMENTA = {
    16384: (0.8, 0.95),
    32768: (0.9, 0.9),
    34816: (0.905882, 0.893750),
    55296: (0.940741, 0.831250),
    65536: (0.95, 0.8),
    69632: (0.952941, 0.787500),
    87040: (0.962353, 0.734375),
    121856: (0.973109, 0.628125),
}


@pytest.mark.parametrize("batch", MOMENTA)
def test_momentum_of_each_rule_has_the_tabulated_values(batch):
    by_noise, printed = MOMENTA[batch]
    assert schedules.momentum("noise_scale", 0.9, global_batch=batch) == pytest.approx(by_noise, abs=5e-7)
    assert schedules.momentum("as_printed", 0.9, global_batch=batch) == pytest.approx(printed, abs=5e-7)
    assert schedules.momentum("constant", 0.9, global_batch=batch) == 0.9


@pytest.mark.parametrize(("epoch", "first"), [(-1.0, 0.0), (29.0, 30.0)])
def test_rate_before_the_schedule_is_refused(epoch, first):
    schedule = dataclasses.replace(SONY_B, from_epoch=first)
    with pytest.raises(ConfigError, match=rf"^epoch={epoch}: must be at least {first:g}, "):
        schedules.learning_rate(schedule, epoch, epochs=90.0, global_batch=256)
