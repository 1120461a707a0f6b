import numpy as np
import pytest

from jaxdp.distributed.stragglers import Stragglers, describe


def test_report_of_a_late_process_gives_its_delay_and_the_share_of_waiting():
    """By hand: three processes, steps of 1 s; the third always dispatches 0.25 s after the previous step has completed."""
    stragglers, end = Stragglers(3), 0.0
    for step in range(1, 11):
        dispatched = [end - 0.5, end + 0.05, end + 0.25]  # the first is ready when the previous step has completed
        stragglers.include(step, dispatched, [end + 1.0, end + 1.01, end + 1.02])
        end += 1.0
    report = stragglers.report(["a", "b", "c"])
    slowest = report["slowest"][0]
    assert report["waiting_share"] == pytest.approx(np.mean([0.25, 0.20, 0.0]))
    assert (slowest["rank"], slowest["host"], slowest["last_share"]) == (2, "c", 1.0)
    assert slowest["late_seconds"] == pytest.approx(0.25 - 0.05)  # later than the median process
    assert "rank 2 on c (200 ms late per step, last in 100 % of the steps)" in describe(report)
    assert describe(report | {"waiting_share": 0.004}) == ""
    assert stragglers.report(["a", "b", "c"]) == {}
    assert stragglers.report(["a", "b", "c"], whole_run=True) == report


def test_include_of_steps_that_are_not_consecutive_leaves_them_out():
    """An evaluation or a save took place between them, in which no process waits for a straggler."""
    stragglers = Stragglers(2)
    stragglers.include(1, [0.0, 0.0], [1.0, 1.0])
    stragglers.include(5, [1.0, 9.0], [10.0, 10.0])
    assert stragglers.report(["a", "b"]) == {}
