"""Progress, speed and remaining time of a run."""

import pytest
from helpers.watch import training_record

from jaxdp.report.pace import measure


def steps(numbers, **fields):
    return [training_record(step, **fields) for step in numbers]


def test_steady_run_has_its_speed_and_the_time_of_the_missing_epochs():
    """64 images a second, ten steps an epoch: after 25 of 100 steps, 75 seconds remain."""
    pace = measure(steps(range(1, 26)), epochs=10.0)
    assert (pace.fraction, pace.epoch) == pytest.approx((0.25, 2.5))
    assert (pace.remaining_seconds, pace.images_per_second) == pytest.approx((75.0, 64.0))
    assert (pace.steps_share, pace.input_share) == pytest.approx((1.0, 0.0))
    assert (pace.waiting_share, pace.slowest_rank) == (None, None)


def test_remaining_time_includes_evaluations_and_ends_with_the_last_one():
    """Each step of one second is followed by one second of evaluation, which is half of the time."""
    records = []
    for step in range(1, 11):
        step_record = training_record(step) | {"wall_seconds": 2.0 * step}
        position = {name: step_record[name] for name in ("step", "samples", "epoch")}
        records += [step_record, position | {"wall_seconds": 2.0 * step + 1, "eval_accuracy": 0.5}]
    pace = measure(records, epochs=2.0)
    assert pace.remaining_seconds == pytest.approx(10 * 2 - 1)
    assert pace.steps_share == pytest.approx(0.5)


def test_remaining_time_follows_the_speed_of_the_second_half():
    slow = steps(range(1, 11), seconds=1.0)
    fast = [training_record(step) | {"wall_seconds": 20.0 + 0.1 * (step - 10)} for step in range(11, 111)]
    assert measure(slow + fast, epochs=12.1).remaining_seconds == pytest.approx(11 * 0.1, rel=0.2)


def test_shares_are_of_the_recent_time():
    """Steps of one second: the first 400 never waited, and the last 320 waited a quarter of their time."""
    records = steps(range(1, 401)) + steps(range(401, 721), input_seconds=0.25, waiting_share=0.5, slowest_rank=3)
    pace = measure(records, epochs=100.0)
    assert pace.recent_seconds == pytest.approx(300.0)
    assert (pace.steps_share, pace.input_share) == pytest.approx((0.75, 0.25))
    assert (pace.waiting_share, pace.slowest_rank) == (pytest.approx(0.5), 3)


def test_earlier_sessions_do_not_count():
    """A resumed run: the steps of the first session took ten seconds, those since sample 640 one second."""
    records = steps(range(1, 11), seconds=10.0)
    records += [training_record(step) | {"wall_seconds": 200.0 + step} for step in range(11, 21)]
    pace = measure(records, epochs=3.0, session_start=640)
    assert pace.remaining_seconds == pytest.approx(10.0)
    assert pace.recent_seconds == pytest.approx(9.0)


@pytest.mark.parametrize(
    "records",
    [
        [],
        steps([1]),
        [{"samples": 5, "epoch": 0.1, "eval_accuracy": 0.5}],
        steps([1, 1, 1]),
        steps([3, 2, 1]),
        steps(range(1, 9), images_per_second=0.0),
        steps(range(1, 9), images_per_second=None),
    ],
)
def test_logs_that_tell_little_leave_the_rest_unknown(records):
    pace = measure(records, epochs=2.0)
    assert 0 <= pace.fraction <= 1
    assert pace.steps_share is None
    if len(records) < 8:
        assert pace.remaining_seconds is None


def test_run_beyond_its_epochs_is_complete():
    pace = measure(steps(range(1, 21)), epochs=1.9)
    assert (pace.fraction, pace.remaining_seconds) == (1.0, 0.0)
