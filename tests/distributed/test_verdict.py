"""Who is blamed, by the records of all processes: rules without processes, files or time of their own."""

import itertools
from dataclasses import replace

import pytest

from jaxdp.distributed import verdict
from jaxdp.distributed.status import COMPILER, DEVICES, OTHER_RANKS, THREAD, Failure, Heartbeat, Record
from jaxdp.distributed.verdict import LATE, STUCK, Judge, Limits, Records

LIMITS = Limits(late_seconds=30, stuck_seconds=600, silence_seconds=15, start_seconds=60)


def record(rank, count=0, **fields):
    own = {"beat": Heartbeat("step", 7, position=(0, 1, 5)), "place": f"main thread at user.py:{rank} in f"}
    return Record("host:1", rank, f"node{rank}", machine=f"m{rank}", pid=100 + rank, count=count, **own | fields)


class Run:
    """Three processes, read once a second by rank 0."""

    def __init__(self, gone=()):
        self.records, self.judge, self.clock, self.count = Records(), Judge(LIMITS, lambda one: one.rank in gone), 0.0, 0
        self.read()
        self.read()

    def read(self, seconds=1, silent=(), **changed):
        """The verdict after `seconds` without a write of the silent ranks; changed: fields of ranks, as r1={...}."""
        found = None
        for _ in range(seconds):
            self.clock, self.count = self.clock + 1, self.count + 1
            for rank in set(range(3)) - set(silent):
                self.records.add(rank, record(rank, self.count, **changed.get(f"r{rank}", {})), self.clock)
            for rank in silent:
                self.records.add(rank, None, self.clock)
            found = found or self.judge.verdict(self.records, self.clock)
        return found


def test_a_healthy_run_has_no_verdict():
    assert Run().read(100) is None


def test_a_silent_process_is_named_with_its_last_step_and_place():
    run = Run()
    assert run.read(14, silent=[2]) is None
    assert str(run.read(3, silent=[2])) == (
        "rank 2 on node2 failed in step 7: sent no sign of life for 15 s (suspended, cut off from the network, or in native "
        "code that holds the GIL); main thread at user.py:2 in f"
    )


def test_a_reader_that_was_suspended_blames_nobody():
    """Its clock stood still: 150 s later it reads files that have not changed either, and then ones that have."""
    run = Run()
    run.clock += 150
    assert run.read(2, silent=[1, 2]) is None
    assert run.read(30) is None


def test_a_slow_directory_is_no_silent_process():
    """Files that are read or written every 10 s change between two reads of the limit at most once."""
    run = Run()
    run.read(1, r2={"write_seconds": 4.0})
    assert run.read(25, silent=[2]) is None
    assert run.read(5, silent=[2]).rank == 2


def test_all_processes_silent_but_rank_0_points_at_its_own_host():
    assert "the host of rank 0 may be cut off" in Run().read(20, silent=[1, 2]).reason


def test_a_process_that_is_gone_is_named_at_the_second_look():
    run = Run()
    run.judge = Judge(LIMITS, lambda one: one.rank == 1)
    assert run.read() is None
    found = run.read()
    assert (found.rank, found.reason) == (1, "exited without a message (killed or crashed)")


def test_a_process_that_has_left_is_neither_gone_nor_silent():
    run = Run(gone=[1])
    run.judge = Judge(LIMITS, lambda one: one.rank == 1)
    run.records.add(1, record(1, 99, left=True), run.clock)
    assert run.read(40, silent=[1]) is None


def test_an_error_is_reported_at_once_with_its_exit_code_and_place():
    found = Run().read(r1={"failure": Failure("mesh.vertical=3: no", 2, place="raised at user.py:9 in g")})
    assert (found.rank, found.code) == (1, 2)
    assert str(found).endswith("mesh.vertical=3: no; raised at user.py:9 in g")


def test_a_failed_collective_is_blamed_on_the_process_that_fell_silent():
    run = Run()
    failed = {"failure": Failure("Gloo: connection closed by peer", collective=True)}
    assert run.read(10, silent=[2], r0=failed, r1=failed) is None
    assert run.read(10, silent=[2], r0=failed, r1=failed).rank == 2


def test_a_failed_collective_without_another_cause_is_reported_in_the_end():
    failed = {"failure": Failure("NCCL error", collective=True)}
    run = Run()
    assert run.read(15, r1=failed) is None
    assert str(run.read(10, r1=failed)).startswith("rank 1 on node1 failed in step 7: NCCL error")


def test_a_collective_that_fails_on_several_processes_is_blamed_on_none_of_them():
    """As after a cut link, while the host behind it still reaches the directory."""
    failed = {"failure": Failure("Gloo: timed out", collective=True)}
    found = Run().read(30, r0=failed, r2=failed)
    reason = "a collective failed on rank 0 on node0, rank 2 on node2: Gloo: timed out; rank 1 on node1 reported nothing"
    assert (found.rank, str(found)) == (None, reason)


@pytest.mark.parametrize("gone", [[1], [0, 1]])
def test_a_process_that_has_reported_a_failed_collective_is_not_blamed_for_its_own_end(gone):
    """Its library or its launcher has ended it then; the process that fell silent is the cause."""
    run, failed = Run(gone=gone), {"failure": Failure("Gloo: connection closed by peer", collective=True)}
    states = {f"r{rank}": failed for rank in gone}
    assert run.read(3, **states) is None
    found = run.read(30, silent=[*gone, 2], **states)
    assert (found.rank, found.reason[:20]) == (2, "sent no sign of life")


def test_a_process_that_is_gone_is_blamed_although_another_has_reported_a_failed_collective():
    run, failed = Run(gone=[2]), {"failure": Failure("Gloo: connection closed by peer", collective=True)}
    run.read(1, r1=failed)
    assert (found := run.read(1, r1=failed, silent=[2])).rank == 2
    assert found.reason == verdict.KILLED


@pytest.mark.parametrize(("cut_off", "named"), [([1], 1), ([2], 2), ([1, 2], 0)])
def test_a_failed_collective_is_blamed_on_the_host_that_is_cut_off_not_on_the_first_that_reports(cut_off, named):
    states = {f"r{rank}": {"cut_off": True} for rank in cut_off}
    states["r1"] = states.get("r1", {}) | {"failure": Failure("Gloo: timed out", collective=True, place="loop.py:9 in read")}
    found = Run().read(30, **states)
    assert (found.rank, found.place) == (named, "loop.py:9 in read")
    assert found.reason.startswith("a collective failed on rank 1 on node1: Gloo: timed out; rank ")
    assert found.reason.endswith(" not reach rank 0 on node0 over the network")


AHEAD = Heartbeat("step", 7, position=(0, 1, 6), idle_seconds=601.0, waits=OTHER_RANKS)
BEHIND = replace(AHEAD, position=(0, 1, 5), idle_seconds=602.0)
WAITS = {"overdue": STUCK, "beat": AHEAD}
WORKS = {"overdue": STUCK, "beat": replace(BEHIND, waits="")}


def test_the_process_that_executes_code_is_stuck_not_those_that_wait_for_it():
    found = Run().read(r0=WAITS, r1=WORKS, r2=WAITS)
    assert str(found) == "rank 1 on node1 failed in step 7: stuck: no progress for 602 s; main thread at user.py:1 in f"


def test_if_all_wait_the_one_behind_the_others_is_stuck():
    found = Run().read(6, r0=WAITS, r1=WAITS | {"beat": BEHIND}, r2=WAITS)
    assert found.rank == 1


def test_if_all_wait_at_the_same_point_no_rank_is_blamed():
    found = Run().read(6, r0=WAITS, r1=WAITS, r2=WAITS)
    assert found.rank is None
    assert found.reason.endswith(
        "all ranks wait for each other or for their devices in step 7: a device, the network or a collective is stuck"
    )


@pytest.mark.parametrize(
    ("elsewhere", "advised"),
    [
        (Heartbeat("evaluate", 6, "waiting for all", position=(0, 2, 0), idle_seconds=601.0), True),  # as if it alone asked
        (Heartbeat("finish", 6, position=(0, 1, 7), idle_seconds=601.0), True),
        (Heartbeat("load", 8, position=(0, 1, 7), idle_seconds=601.0), False),  # it has started one more step
    ],
)
def test_ranks_that_wait_for_each_other_at_different_points_are_named_each_with_its_own(elsewhere, advised):
    in_step = WAITS | {"beat": replace(BEHIND, waits=DEVICES)}
    found = Run().read(6, r0=WAITS | {"beat": replace(elsewhere, waits=OTHER_RANKS)}, r1=in_step, r2=in_step)
    assert found.rank is None
    named = f"rank 0 on node0 {elsewhere.location}; rank 1 on node1, rank 2 on node2 in step 7): a device, the network"
    assert named in found.reason
    assert ("callbacks ask for evaluate and stop on all processes" in found.reason) == advised


CUT_OFF = WAITS | {"cut_off": True}


def test_if_all_wait_the_one_that_does_not_reach_rank_0_is_named_also_if_another_is_behind():
    run, behind = Run(), WAITS | {"beat": BEHIND}
    assert run.read(2, r0=WAITS, r1=behind, r2=WAITS) is None  # the processes find out now
    found = run.read(4, r0=WAITS, r1=behind, r2=CUT_OFF)
    assert found.rank == 2
    assert found.reason == "stuck: no progress for 601 s; rank 2 on node2 does not reach rank 0 on node0 over the network"


def test_rank_0_is_named_if_no_other_host_reaches_it():
    found = Run().read(6, r0=WAITS, r1=CUT_OFF, r2=CUT_OFF)
    assert found.rank == 0
    assert found.reason.endswith("; rank 1 on node1, rank 2 on node2 do not reach rank 0 on node0 over the network")


def test_of_two_hosts_that_do_not_reach_each_other_neither_is_blamed():
    two = {0: record(0, **WAITS), 1: record(1, **CUT_OFF), 2: replace(record(2, **CUT_OFF), host="node1")}
    assert verdict.at_fault(two) == []
    assert verdict.headline(two).endswith("; rank 1 on node1, rank 2 on node1 do not reach rank 0 on node0 over the network")


def test_a_process_that_is_cut_off_is_not_blamed_for_one_that_executes_code_or_is_not_overdue():
    found = Run().read(6, r0=WAITS, r1=WORKS, r2=CUT_OFF)
    assert found.rank == 1
    assert found.reason.startswith("stuck: no progress for 602 s; rank 2 on node2 does not reach rank 0")
    run = Run()
    run.read(r1=WAITS, r2=CUT_OFF)
    assert verdict.at_fault(run.records.alive) == []


def test_processes_that_wait_again_have_the_time_again_to_find_out_whether_they_reach_rank_0():
    run, all_wait = Run(), dict.fromkeys(("r0", "r1", "r2"), WAITS)
    assert run.read(4, **all_wait) is None
    assert run.read() is None
    assert run.read(4, **all_wait) is None


def test_who_starts_a_step_later_than_the_others_is_not_blamed_for_a_collective_that_is_stuck():
    """A step is started while the one before computes, as far as the devices let it."""
    found = Run().read(6, r0=WAITS, r1=WAITS | {"beat": replace(BEHIND, waits=DEVICES)}, r2=WAITS)
    assert found.rank is None
    assert "rank 1" not in found.reason


def test_only_a_process_that_compiles_may_take_half_an_hour_in_a_compilation():
    """Others wait in it for values and collectives; their run ends if none compiles, as after a cut link."""
    beat = Heartbeat("compile", position=(0, 1, 5), idle_seconds=601.0)
    compiling, waiting = (replace(beat, waits=each) for each in (COMPILER, OTHER_RANKS))
    assert [verdict.overdue(each, LIMITS) for each in (compiling, beat, waiting)] == [LATE, LATE, STUCK]
    waits, compiles = {"overdue": STUCK, "beat": waiting}, {"overdue": LATE, "beat": compiling}
    assert Run().read(r0=waits, r1=compiles, r2=waits) is None
    assert "all ranks wait for each other" in Run().read(6, r0=waits, r1=waits, r2=waits).reason


def test_those_that_wait_for_a_slow_process_are_not_stuck():
    """Rank 1 makes progress, slowly: no process is blamed, and nothing is reported."""
    run = Run()
    assert run.read(r0=WAITS, r2=WAITS) is None
    assert verdict.report(run.records.alive, LIMITS) == []


def test_a_report_names_the_process_at_fault_its_stack_and_when_the_run_ends():
    run = Run()
    late = {"overdue": LATE, "beat": replace(AHEAD, idle_seconds=31.0)}
    beat = replace(late["beat"], detail="waiting for images", waits=THREAD)
    at_fault = {"beat": beat, "stacks": ("  user.py:9 in f",)}
    run.read(r0=late, r1=late | at_fault, r2=late)
    assert verdict.report(run.records.alive, LIMITS) == [
        "no progress for 31 s: rank 1 on node1 in step 7, waiting for images; 2 ranks are waiting. The run ends after 10 "
        "minutes without progress (guard.step_minutes)",
        "Stack of rank 1 on node1, most recent call first:",
        "  user.py:9 in f",
    ]


SILENT, FAILED = {"silent": [2]}, {"failure": Failure("Gloo: timed out", collective=True)}
ALL_WAIT = {key: WAITS for key in ("r0", "r1", "r2")}


@pytest.mark.parametrize(
    ("write_seconds", "state", "second"),
    [
        (0.0, SILENT, 16),
        (4.0, SILENT, 28),  # three times what it takes to write longer
        (0.0, {"r1": FAILED}, 21),
        (0.0, {"r1": {"failure": Failure("no")}}, 1),
        (0.0, ALL_WAIT | {"r1": {"overdue": STUCK, "beat": replace(AHEAD, waits=COMPILER)}}, 1),
        (0.0, ALL_WAIT, 6),
    ],
)
def test_the_second_at_which_the_verdict_comes(write_seconds, state, second):
    run = Run()
    run.read(1, r2={"write_seconds": write_seconds})
    assert [run.read(1, **state) is not None for _ in range(second)] == [False] * (second - 1) + [True]


def test_a_process_is_silent_after_three_reads_of_an_unchanged_file():
    records = Records()
    for count, clock in ((0, 0.0), (1, 10.0), (1, 20.0), (1, 30.0)):
        records.add(0, record(0, count), clock)
        assert records.silent(15, clock) == []
    records.add(0, None, 40.0)
    assert [one.rank for one in records.silent(29, 40.0)] == [0]
    assert records.silent(30, 40.0) == []
    records.add_outage(5.0)
    assert records.silent_seconds(0, 40.0) == 25
    records.add(0, replace(record(0, 1), pid=1), 41.0)  # another process at the same count
    assert records.silent_seconds(0, 99.0) == 0


def test_a_process_that_seems_gone_at_every_other_look_is_not():
    run, looks = Run(), itertools.cycle([True, False])
    run.judge = Judge(LIMITS, lambda one: one.rank == 1 and next(looks))
    assert run.read(10) is None


FIRST_STEP = Heartbeat("step", 1)


@pytest.mark.parametrize(
    ("beat", "seconds", "of_single"),
    [
        (Heartbeat("start"), 30, 30),
        (Heartbeat("load"), 30, 30),
        (Heartbeat("load", 3), 52.5, 52.5),
        (Heartbeat("compile"), 52.5, 52.5),
        (FIRST_STEP, 52.5, 120),
        (Heartbeat("evaluate", 1), 52.5, 52.5),
        (Heartbeat("step", 1, longest_seconds=20), 80, 80),
        (Heartbeat("step", 50, typical_seconds=0.1), 30, 30),
        (Heartbeat("step", 50, typical_seconds=10), 150, 150),
        (Heartbeat("save", 50, typical_seconds=10), 52.5, 52.5),
        (Heartbeat("save", 50, longest_save_seconds=10), 150, 150),
    ],
)
def test_a_process_is_late_after(beat, seconds, of_single):
    """Slow is not stuck: fifteen usual steps, four of the longest while few are known."""
    for is_single, limit in ((False, seconds), (True, of_single)):
        for idle, expected in ((limit - 0.1, ""), (limit, LATE), (1799.9, LATE), (1800, STUCK)):
            assert verdict.overdue(replace(beat, idle_seconds=idle), Limits(), is_single=is_single) == expected


def test_a_background_save_counts_once_it_is_longer_than_saves_usually_are():
    """From then on by the limit of a save, also during a compilation."""
    beat, limits = Heartbeat("compile", idle_seconds=60, background_save="x"), Limits(stuck_seconds=61)
    for seconds, expected in ((52.4, LATE), (60.9, LATE), (61, STUCK)):
        assert verdict.overdue(replace(beat, save_seconds=seconds), limits) == expected
    step = Heartbeat("step", 5, typical_seconds=1, idle_seconds=31, background_save="x")
    for seconds, longest, expected in ((52.4, 0, LATE), (52.5, 0, STUCK), (74, 5, LATE), (75, 5, STUCK)):
        beat = replace(step, save_seconds=seconds, longest_save_seconds=longest)
        assert verdict.overdue(beat, Limits(stuck_seconds=40)) == expected
        assert verdict.overdue(replace(beat, activity="outside"), Limits(stuck_seconds=40)) == ""
        assert verdict.overdue(replace(beat, idle_seconds=0), Limits(stuck_seconds=None)) == (LATE if expected == STUCK else "")


def test_a_compilation_may_take_half_an_hour_and_a_background_save_counts():
    assert verdict.overdue(Heartbeat("step", 5, typical_seconds=1, idle_seconds=700), LIMITS) == STUCK
    assert verdict.overdue(Heartbeat("compile", idle_seconds=700), LIMITS) == LATE
    assert verdict.overdue(Heartbeat("compile", idle_seconds=1801), LIMITS) == STUCK
    assert Limits(stuck_seconds=20, start_seconds=60).stuck_after("start") == 60
    saving = Heartbeat("step", 5, typical_seconds=1, background_save="x", save_seconds=700)
    assert verdict.overdue(saving, LIMITS) == STUCK
    assert record(0, overdue=STUCK, beat=saving).seconds == 700
    assert verdict.overdue(Heartbeat("outside", idle_seconds=9999), LIMITS) == ""


def test_processes_that_have_not_started_are_named():
    records = Records()
    for count in (1, 2):
        records.add(0, record(0, count), 0.0)
    records.add(2, record(2, 5), 0.0)  # the file of an earlier run: it does not change
    assert str(verdict.missing(records, 3, 60)) == (
        "2 of 3 processes did not start within 60 s: ranks 1, 2 (started: rank 0 on node0); they may not share --workdir"
    )
    assert "9 of 10 processes did not start within 60 s: ranks 1, 2, 3, 4, 5 and 4 more (" in str(
        verdict.missing(records, 10, 60)
    )
    eight = [record(rank) for rank in range(8)]
    assert verdict.names(eight).endswith("rank 3 on node3, rank 4 on node4 and 3 more")
    assert verdict.names(eight[:5]).endswith(", rank 3 on node3, rank 4 on node4")
    assert verdict.missing(records, 1, 60) is None
    assert "5 of 6 processes did not start within 60 s: ranks 1, 2, 3, 4, 5 (started" in str(verdict.missing(records, 6, 60))
    assert verdict.waiting(dict(enumerate(eight)), 9, LIMITS) == (
        "waiting for rank 8 to start; the run ends after 1 minutes (guard.start_minutes)"
    )


@pytest.mark.parametrize(
    ("beat", "seconds", "is_cut_off"),
    [
        (Heartbeat("step", 9, idle_seconds=601), 601, True),
        (Heartbeat("step", 9, idle_seconds=1), 9999, False),  # the directory is gone, and training continues
        (Heartbeat("step", 9, idle_seconds=601), 9, False),  # the other ranks decide
        (Heartbeat("compile", idle_seconds=700), 700, False),
        (Heartbeat("outside", idle_seconds=9999), 9999, False),
    ],
)
def test_a_process_without_progress_that_hears_from_nobody_ends_itself(beat, seconds, is_cut_off):
    """Its host has lost network and directory; the limit is ten minutes, or less with a smaller guard.step_minutes."""
    found = verdict.cut_off(record(1, beat=replace(beat, waits=COMPILER)), seconds, LIMITS, board="runs/a/processes")
    assert bool(found) == is_cut_off
    if found:
        assert str(found).startswith(
            "rank 1 on node1 failed in step 9: no progress, and no answer of the status files in runs/a/processes, for 600 s"
        )
    for waits in (OTHER_RANKS, ""):  # for values in the directory, or writes a file in it
        in_directory = record(1, beat=Heartbeat("compile", idle_seconds=700, waits=waits))
        assert verdict.cut_off(in_directory, 700, LIMITS, board="runs/a/processes")
    assert Limits(stuck_seconds=1800).cut_off_after("step") == 600
    assert Limits(stuck_seconds=None).cut_off_after("step") == float("inf")
    assert Limits(stuck_seconds=20).cut_off_after("step") == 20


def test_one_process_that_waits_is_counted_in_the_singular_and_several_that_work_are_all_named():
    late = {"overdue": LATE, "beat": replace(AHEAD, idle_seconds=31.0)}
    works = replace(late["beat"], waits="")
    two = {0: record(0, **late), 1: record(1, **late | {"beat": works})}
    assert verdict.headline(two) == "rank 1 on node1 in step 7; 1 rank is waiting"
    both = {rank: replace(one, beat=works, stacks=(f"  user.py:{rank}",)) for rank, one in two.items()}
    assert verdict.headline(both) == "rank 0 on node0, rank 1 on node1 in step 7"
    first, *stacks = verdict.report(both, replace(LIMITS, stuck_seconds=None))
    assert first == "no progress for 31 s: rank 0 on node0, rank 1 on node1 in step 7"  # and no end
    owners = [f"Stack of rank {rank} on node{rank}, most recent call first:" for rank in range(2)]
    assert stacks == [owners[0], "  user.py:0", owners[1], "  user.py:1"]
    both[0] = replace(both[0], beat=replace(works, waits=COMPILER))
    assert not verdict.report(both, LIMITS)[0].startswith("XLA has been compiling")  # one of them does not
    found = Judge(LIMITS, lambda one: False)._stuck({rank: replace(one, overdue=STUCK) for rank, one in both.items()}, 0.0)
    assert (found.rank, found.reason) == (None, "stuck: no progress for 31 s: rank 0 on node0, rank 1 on node1 in step 7")
    assert verdict.report({}, LIMITS) == []


def single(**fields):
    return {0: replace(record(0, **fields), run="")}


def test_a_single_process_is_reported_without_a_rank():
    beat = Heartbeat("load", 9, detail="reading", idle_seconds=31, typical_seconds=0.1)
    alive = single(overdue=LATE, beat=beat, stacks=("  user.py:9 in f",))
    assert verdict.report(alive, LIMITS) == [
        "no progress for 31 s: while loading, step 9, reading. The run ends after 10 minutes without progress "
        "(guard.step_minutes)",
        "Stack, most recent call first:",
        "  user.py:9 in f",
    ]
    for waits in ("", DEVICES):
        (stuck,) = single(overdue=STUCK, beat=replace(beat, idle_seconds=600, waits=waits)).values()
        records = Records()
        for count in range(2):
            records.add(0, replace(stuck, count=count), 0.0)
        found = Judge(LIMITS, lambda one: False).verdict(records, 0.0)
        assert (
            str(found) == "failed while loading, step 9, reading: stuck: no progress for 600 s; main thread at user.py:0 in f"
        )


def test_the_first_step_of_a_single_process_may_take_two_minutes_and_is_reported_in_one_line():
    first = Heartbeat("step", 1, idle_seconds=119)
    assert verdict.overdue(first, LIMITS, is_single=True) == ""
    first = replace(first, idle_seconds=121)
    assert verdict.overdue(first, LIMITS, is_single=True) == LATE
    (line,) = verdict.report(single(overdue=LATE, beat=first), LIMITS)
    assert line.startswith("the first step has taken 121 s so far, which is normal on a slow machine. The run ends after 10")


def test_a_compilation_is_reported_in_one_line_and_ends_the_run_after_half_an_hour():
    beat = Heartbeat("compile", idle_seconds=60, waits=COMPILER)
    (line,) = verdict.report(single(overdue=LATE, beat=beat), LIMITS)
    assert line == (
        "XLA has been compiling for 60 s; this can take minutes: during compilation. The run ends after 30 minutes without "
        "progress"
    )
