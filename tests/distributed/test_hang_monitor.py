import pytest
from helpers.hangs import COMPILING, IN_CALLBACK, LIMITS, WAITING_FOR_DEVICES, WORKING, beat

from jaxdp.distributed.hang_monitor import MAX_ANSWER_TICKS, HangMonitor
from jaxdp.distributed.hang_rules import HangLimits


class RecordedMonitor:
    """A monitor of ranks 0 and 1, with its requests for stack traces, its reports and the ends of the run."""

    def __init__(self, stacks, limits=LIMITS, hosts=None):
        self.requests, self.reports, self.ends, self.stacks = [], [], [], stacks
        self.monitor = HangMonitor(
            limits,
            hosts or {0: "node0", 1: "node1"},
            request_stacks=self.request_stacks,
            report=self.reports.append,
            end_run=lambda *end: self.ends.append(end),
        )

    def request_stacks(self, rank):
        self.requests.append(rank)
        if rank in self.stacks:
            self.monitor.add_stacks(rank, self.stacks[rank])

    def update(self, *heartbeats):
        self.monitor.update(dict(enumerate(heartbeats)))


def test_update_of_a_hang_reports_rank_host_activity_step_and_stack_once():
    recorded = RecordedMonitor({1: WORKING})
    for idle in range(25, 60):
        recorded.update(beat(12, idle), beat(10, idle, "load", 8, detail="waiting for images"))
    assert recorded.requests == [1]
    ((text, *stack),) = recorded.reports
    location = "rank 1 on node1 while loading, step 8, waiting for images"
    assert text.startswith(f"no progress for 30 s: {location}; 1 rank is waiting. The run ends after 30 minutes")
    assert "    train.py:7 in __getitem__" in stack
    assert recorded.ends == []


def test_update_of_a_rank_ahead_in_a_callback_reports_that_rank():
    recorded = RecordedMonitor({0: WAITING_FOR_DEVICES, 1: IN_CALLBACK})
    recorded.update(beat(10, 31.0), beat(12, 31.0))
    assert recorded.reports[0][0].startswith("no progress for 31 s: rank 1 on node1 in step 7; 1 rank is waiting.")


def test_update_after_end_seconds_ends_the_run_with_the_rank_at_fault_and_its_frames():
    recorded = RecordedMonitor({1: WORKING})
    for idle in (30.0, 1799.0, 1800.0):
        recorded.update(beat(12, idle), beat(10, idle))
    assert recorded.ends == [(1, "stuck: no progress for 1800 s; main thread at train.py:7 in __getitem__")]


def test_update_without_end_seconds_never_ends_the_run():
    recorded = RecordedMonitor({1: WORKING}, HangLimits(30.0, None))
    for idle in (30.0, 1e9):
        recorded.update(beat(12, idle), beat(10, idle))
    assert recorded.ends == []
    assert "ends after" not in recorded.reports[0][0]


def test_update_when_progress_resumes_reports_it_and_the_next_hang():
    recorded = RecordedMonitor({1: WORKING})
    for idle in (31.0, 33.0, 0.0, 0.0, 31.0):
        recorded.update(beat(12, idle), beat(10, idle))
    assert [lines[0][:11] for lines in recorded.reports] == ["no progress", "progress re", "no progress"]
    assert recorded.reports[1][0] == "progress resumed after more than 31 s: rank 1 on node1"


def test_update_without_an_answer_reports_a_missing_stack_trace():
    recorded = RecordedMonitor({})
    for _ in range(MAX_ANSWER_TICKS + 1):
        recorded.update(beat(12, 40.0), beat(10, 40.0))
    assert recorded.reports[0][1] == "No stack trace of rank 1 on node1: no thread of the process answers"


def test_update_of_a_rank_that_waits_for_one_with_progress_reports_nothing():
    recorded = RecordedMonitor({0: WAITING_FOR_DEVICES})
    for _ in range(9):
        recorded.update(beat(10, 40.0), beat(10, 1.0))
    assert recorded.reports == []


def test_update_of_a_stuck_collective_blames_no_rank_and_ends_the_run():
    recorded = RecordedMonitor({0: WAITING_FOR_DEVICES, 1: WAITING_FOR_DEVICES})
    for idle in (40.0, 1800.0):
        recorded.update(beat(10, idle), beat(10, idle))
    text = "all ranks are waiting for each other or for their devices in step 7"
    assert text in recorded.reports[0][0]
    ((rank, reason),) = recorded.ends
    assert (rank, text in reason) == (None, True)


def test_update_of_a_compilation_reports_one_line():
    recorded = RecordedMonitor({1: COMPILING})
    recorded.update(beat(12, 60.0, "compile"), beat(10, 60.0, "compile"))
    (line,) = recorded.reports[0]
    assert line.startswith("XLA has been compiling for 60 s; this can take minutes: rank 1 on node1 during compilation")


@pytest.mark.parametrize(("step_minutes", "ends_at"), [(0.2, 1800), (30.0, 1800), (60.0, 3600), (None, None)])
@pytest.mark.parametrize("stacks", [{1: COMPILING}, {1: WORKING}, {}])
def test_update_of_a_compilation_ends_the_run_after_half_an_hour_or_step_minutes(step_minutes, ends_at, stacks):
    recorded = RecordedMonitor(stacks, HangLimits(30.0, step_minutes and 60 * step_minutes))
    for idle in range(50, 4000):
        recorded.update(beat(12, idle, "compile"), beat(10, idle, "compile"))
        if recorded.ends:
            assert idle == ends_at
            break
    assert bool(recorded.ends) == (ends_at is not None)
    assert (f"The run ends after {(ends_at or 0) / 60:g} minutes" in recorded.reports[0][0]) == (ends_at is not None)


@pytest.mark.parametrize(
    "fields", [{"activity": "step"}, {"activity": "load"}, {"activity": "compile", "background_save": "it"}]
)
def test_update_of_another_hang_ends_the_run_after_step_minutes(fields):
    recorded = RecordedMonitor({0: WORKING}, HangLimits(30.0, 300.0), hosts={0: "this host"})
    for seconds in range(1, 400):
        saving = {"save_seconds": seconds} if "background_save" in fields else {}
        recorded.update(beat(12, 0.0 if saving else seconds, **fields, **saving))
        if recorded.ends:
            assert seconds == 300
            break
    assert recorded.ends


def test_update_of_a_single_process_reports_without_a_rank():
    recorded = RecordedMonitor({0: WORKING}, hosts={0: "this host"})
    recorded.update(beat(10, 40.0))
    assert recorded.reports[0][0].startswith("no progress for 40 s: in step 7.")
    assert "rank" not in recorded.reports[0][0]


def test_update_in_the_first_step_of_a_single_process_reports_one_line_without_a_stack():
    recorded = RecordedMonitor({0: WORKING}, hosts={0: "node0"})
    recorded.update(beat(1, 121.0, typical_seconds=None))
    ((text,),) = recorded.reports
    assert text.startswith("the first step has taken 121 s so far, which is normal on a slow machine. The run ends after 30")
