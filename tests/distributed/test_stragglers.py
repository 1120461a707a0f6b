import numpy as np
import pytest

from jaxdp.distributed.stragglers import StepTimes, Stragglers, describe

HOSTS = ["a", "b", "c"]


def sums_of(waited):
    """StepTimes of three steps that take 1 s; after each, the process waited for so long."""
    one = Stragglers(3)
    for step in range(4):
        one.add(step, waited, completed=step)
    return one.own


def test_the_process_that_waits_least_is_the_slowest():
    times = {0: sums_of(0.9), 1: sums_of(0.9), 2: sums_of(0.5)}
    assert times[2] == StepTimes(3, pytest.approx(3.0), pytest.approx(1.5))
    report = Stragglers(3).report(times, HOSTS)
    assert report["waiting_share"] == pytest.approx(0.8 / 3)  # ranks 0 and 1 wait 0.4 of every second for rank 2
    slowest = report["slowest"][0]
    assert (slowest["rank"], slowest["host"], slowest["late_seconds"]) == (2, "c", pytest.approx(0.4))
    assert describe(report) == (
        "devices waited for other processes 27 % of the time, mostly for rank 2 on c (400 ms late per step)"
    )


def test_a_report_covers_the_steps_since_the_last_one_or_the_whole_run():
    one = Stragglers(2)
    even, late = StepTimes(10, 10.0, 10.0), StepTimes(20, 20.0, 15.0)
    assert one.report({0: even, 1: even}, HOSTS)["waiting_share"] == 0
    times = {0: StepTimes(20, 20.0, 20.0), 1: late}
    assert one.report(times, HOSTS, whole_run=True)["waiting_share"] == pytest.approx(0.125)
    assert one.report(times, HOSTS)["waiting_share"] == pytest.approx(0.25)
    assert one.report(times, HOSTS) == {}  # no step since then


def test_a_report_of_many_steps_is_what_numpy_computes_from_those_since_the_last_one():
    rng, one = np.random.default_rng(0), Stragglers(4)
    seconds, waited = rng.uniform(1, 2, (4, 30)), rng.uniform(0, 1, (4, 30))

    def after(step):
        return {rank: StepTimes(step, seconds[rank, :step].sum(), waited[rank, :step].sum()) for rank in range(4)}

    for first, last in ((0, 7), (7, 30)):
        report = one.report(after(last), "abcd")
        mean = waited[:, first:last].mean(1)
        share = (mean - mean.min()).mean() / seconds[:, first:last].mean()
        assert report["waiting_share"] == pytest.approx(share)
        late = np.maximum(0, np.median(mean) - np.sort(mean))[:3]
        assert [each["late_seconds"] for each in report["slowest"]] == pytest.approx(late)
        assert [each["rank"] for each in report["slowest"]] == [*np.argsort(mean)[:3]]


def test_nothing_is_reported_before_all_processes_have_taken_a_step():
    assert Stragglers(2).report({0: StepTimes(3, 3.0, 3.0)}, HOSTS) == {}
    assert Stragglers(2).report({0: StepTimes(3, 3.0, 3.0), 1: StepTimes()}, HOSTS) == {}
    assert Stragglers(1).report({0: StepTimes(3, 0.0, 0.0)}, HOSTS) == {}  # shorter than the clock shows
    assert describe({"waiting_share": 0.0049, "slowest": []}) == ""
    slowest = [{"rank": 1, "host": "b", "late_seconds": 0.001}]
    assert describe({"waiting_share": 0.0051, "slowest": slowest}).startswith("devices waited for other processes 1 % of")


def test_the_share_of_a_process_that_waits_longer_than_its_steps_take_is_one():
    """The sums end at different times."""
    assert Stragglers(2).report({0: StepTimes(1, 1.0, 0.0), 1: StepTimes(1, 1.0, 9.0)}, HOSTS)["waiting_share"] == 1


def test_steps_before_a_gap_and_the_time_of_the_gap_do_not_count():
    """As between two phases, whose step numbers do not follow each other."""
    one = Stragglers(1)
    for step, completed in ((1, 10.0), (2, 12.0), (9, 100.0), (10, 103.0)):
        one.add(step, 0.5, completed)
    assert one.own == StepTimes(2, 5.0, 1.0)


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_one_late_process_is_compared_with_the_median_and_of_two_with_the_other(processes):
    waited = [0.5] * (processes - 1) + [0.2]
    times = {rank: StepTimes(10, 20.0, 10 * each) for rank, each in enumerate(waited)}
    report = Stragglers(processes).report(times, [f"h{rank}" for rank in range(processes)])
    first = report["slowest"][0]
    assert (first["rank"], first["host"], first["late_seconds"]) == (processes - 1, f"h{processes - 1}", pytest.approx(0.3))
    assert report["waiting_share"] == pytest.approx(0.3 * (processes - 1) / processes / 2)
    assert len(report["slowest"]) == min(processes, 3)
