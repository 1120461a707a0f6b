import faulthandler
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from helpers.processes import TIMEOUT, popen
from helpers.step import with_parts

from jaxdp import Callback, train
from jaxdp.config import Guard
from jaxdp.distributed import follower as follower_module
from jaxdp.distributed import stack_traces, status, verdict
from jaxdp.distributed import watchdog as supervisor_module
from jaxdp.distributed.follower import Follower
from jaxdp.distributed.launchers import Cluster
from jaxdp.distributed.status import Directory, Failure, ProcessStatus, Verdict
from jaxdp.distributed.verdict import LATE, STUCK, Limits
from jaxdp.distributed.watchdog import Watchdog
from jaxdp.file_locks import start_time

HANGS = """
import threading, time
from jaxdp.distributed import status
from jaxdp.distributed.watchdog import watch
from jaxdp.distributed.verdict import Limits
def stands_still():
    time.sleep(600)
threading.Thread(target=stands_still, daemon=True).start()
time.sleep(0.1)
process, limits = status.current(), Limits(0.4, 1.2)
with watch(limits):
    for step in range(8):
        process.begin_iteration("step")
        process.set_activity("step", step)
        time.sleep(0.02)
print("outside")  # written by the end, which flushes
time.sleep(2)
with watch(limits) as watchdog:
    watchdog.resume_hint = "do this"
    process.set_activity("load", 9, "reading")
    stands_still()
"""
HOLDS_THE_GIL = """
import ctypes, os, signal
from jaxdp.distributed.watchdog import watch
from jaxdp.distributed.verdict import Limits
def computes():
    print("holds", flush=True)
    ctypes.PyDLL(None).usleep(2_500_000)
with watch(Limits(0.5, None)): computes()
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False)


def test_watch_of_a_process_without_progress_ends_it_with_the_stacks_of_all_threads():
    completed = run(HANGS)
    assert completed.returncode == 1
    assert completed.stdout == "outside\n"
    first, *_, last = completed.stderr.splitlines()
    assert first.startswith("jaxdp: no progress for 0 s: while loading, step 9, reading. The run ends after 0.02 minutes")
    assert completed.stderr.count("line 7 in stands_still") == 2  # by faulthandler: this thread and the other
    reason = "stuck: no progress for 1 s; main thread at <string>:7 in stands"
    assert last.startswith(f"jaxdp: failed while loading, step 9, reading: {reason}")
    assert last.endswith("; do this")


def test_the_signal_for_stacks_prints_them_while_native_code_holds_the_gil():
    with popen([sys.executable, "-c", HOLDS_THE_GIL]) as process:
        assert process.stdout.readline() == "holds\n"
        process.send_signal(signal.SIGUSR2)
        _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert re.search(r'File "<string>", line [67] in computes', err)  # 6: it has printed, and not yet called


def test_the_reason_of_another_process_is_printed_on_one_line():
    hostile = 'Verdict("a\\nb\\x1b[2J" + "c" * 10_000, 1, "node")'
    completed = run(f"from jaxdp.distributed.watchdog import *\ncurrent().resume_hint = 'do this'\ncurrent().end({hostile})")
    last = completed.stderr.splitlines()[-1]
    assert last.startswith(r"jaxdp: rank 1 on node failed: a\nb\x1b[2Jccc")
    assert last.endswith("ccc...; do this")
    assert completed.stderr.count("\n") < 20


def test_a_process_finds_out_once_when_it_is_overdue_whether_it_reaches_rank_0(monkeypatch):
    asked = []
    monkeypatch.setattr(Cluster, "reaches_rank0", lambda cluster: asked.append(cluster.rank))
    watchdog = Watchdog(Limits())
    watchdog.stop()  # its threads end at once
    board = SimpleNamespace(name="status files", period_seconds=0.0)
    follower = Follower(watchdog, Cluster("jax", "node0", 1, rank=2, num_processes=3), board)
    for overdue, expected in (("", []), (LATE, [2]), (LATE, [2]), (STUCK, [2, 2]), ("", [2, 2])):
        follower.check_board(replace(watchdog.record, overdue=overdue))
        assert asked == expected
        assert watchdog.record.cut_off == (overdue != "")
    monkeypatch.setattr(follower, "_decided", SimpleNamespace(wait=lambda seconds: None))
    monkeypatch.setattr(follower, "leave", lambda: None)
    for collective in (False, True):
        follower.fail(Failure("no", collective=collective))
        follower.check_board(replace(watchdog.record, overdue=LATE))  # what a failure has found out stays
        assert watchdog.record.cut_off == collective


class SlowBoard:
    """A board whose accesses each take 2 s of a clock that it sets. Rank 1 says after 8 s that it leaves."""

    name, period_seconds = "status files", 0.0

    def __init__(self):
        self.clock, self.rank1 = 0.0, None

    def sleep(self, seconds):
        self.clock += seconds

    def write(self, name, text):
        self.sleep(2.0)

    def read(self, name):
        self.sleep(2.0)
        return replace(self.rank1, count=int(self.clock), left=self.clock > 8).to_json()


def test_rank_0_whose_end_ends_the_others_waits_longer_for_them_if_the_directory_is_slow(monkeypatch):
    watchdog, board = Watchdog(Limits()), SlowBoard()
    watchdog.stop()  # its threads end at once
    monkeypatch.setattr(follower_module, "time", SimpleNamespace(monotonic=lambda: board.clock, sleep=board.sleep))
    follower = Follower(watchdog, Cluster("jax", "node0", 1, rank=0, num_processes=2), board)
    board.rank1 = replace(watchdog.record, rank=1, machine="another")
    for count in (1, 2):
        for record in (watchdog.record, board.rank1):
            follower._add(record.rank, replace(record, count=count), 0.0)
    assert watchdog.exit_seconds == 5.0
    follower._write()
    assert watchdog.exit_seconds == 17.0
    follower.board = SimpleNamespace(write=lambda name, text: board.sleep(9.0))
    follower._write()
    assert watchdog.exit_seconds == 30.0  # at most
    follower.board = board
    follower.write_last()
    assert follower._records.alive[1].left


class FailingBoard:
    """A board in memory that answers with an error while `fails` is set; "write": only to writes."""

    name, period_seconds = "runs/a", 0.0

    def __init__(self, texts=None):
        self.texts, self.fails = {} if texts is None else texts, False

    def write(self, name, text):
        if self.fails:
            raise PermissionError(13, "Permission denied")
        self.texts[name] = text

    def read(self, name):
        if self.fails is True:
            raise PermissionError(13, "Permission denied")
        return self.texts.get(name)


def test_a_process_is_not_silent_while_the_directory_does_not_answer():
    watchdog, board, counts = Watchdog(Limits(silence_seconds=15.0)), FailingBoard(), itertools.count()
    watchdog.status = ProcessStatus()
    watchdog.stop()  # its threads end at once
    follower = Follower(watchdog, Cluster("jax", "node0", 1, rank=0, num_processes=2), board)

    def looks(seconds, is_writing=False):
        """The rank that is blamed after that many seconds, with a look in each."""
        for _ in range(seconds):
            if is_writing:
                rank1 = replace(watchdog.record, rank=1, machine="another", count=next(counts))
                board.texts["1.json"] = rank1.to_json()
            watchdog.status.tick(1.0)
            follower._follow()
        return follower._verdict and follower._verdict.rank

    assert looks(5, is_writing=True) is None
    board.fails = True
    assert looks(60) is None
    board.fails = False
    assert looks(13) is None
    assert looks(4) == 1


class Processes:
    """Three processes of a run on a board in memory, each with its own clock, which `pass_time` moves by seconds."""

    def __init__(self, monkeypatch, limits=None):
        self.texts, self.stacks, self.printed, self.ended, self.dead = {}, {}, {}, {}, set()
        self.unreachable, self.now = set(), 0
        self.limits = limits or Limits(late_seconds=30, stuck_seconds=100, silence_seconds=15, start_seconds=60)
        self.followers = {}
        monkeypatch.setattr(follower_module, "start_time", lambda pid: pid - 100 not in self.dead)
        monkeypatch.setattr(Cluster, "reaches_rank0", lambda cluster: cluster.rank not in self.unreachable)
        monkeypatch.setattr(stack_traces, "capture", lambda rank: self.stacks.get(rank, []))
        monkeypatch.setattr(stack_traces, "print_lines", lambda lines: self.printed[self.rank].append("\n".join(lines)))

    def start(self, *ranks, machine="m{}", pid=100, address="node0"):
        for rank in ranks:
            watchdog = Watchdog(self.limits)
            watchdog.status, self.rank = ProcessStatus(), rank
            watchdog.status.training_thread = rank
            watchdog.stop()  # its threads end at once
            watchdog.is_exiting = False
            watchdog.update(host=f"node{rank}", machine=machine.format(rank), pid=pid + rank)
            watchdog.end = partial(self._end, rank)
            self.printed[rank] = []
            board = FailingBoard(self.texts)
            self.followers[rank] = Follower(watchdog, Cluster("jax", address, 1, rank, 3), board)
            watchdog.status.set_activity("step", 7)

    def _end(self, rank, found):
        self.ended.setdefault(rank, (self.now, str(found), found.code))
        self.followers[rank].watchdog.is_exiting = True

    def pass_time(self, seconds, *, idle=(), suspended=()):
        """idle: ranks that make no progress. suspended: ranks that do nothing."""
        for _ in range(seconds):
            self.now += 1
            for rank, follower in self.followers.items():
                if rank in suspended or rank in self.dead or rank in self.ended:
                    continue
                self.rank = rank
                if rank not in idle:
                    follower.watchdog.status.record_progress()
                follower.watchdog._watch()
                follower._follow()


def stack(name=stack_traces.MAIN):
    return [stack_traces.Stack(name, (stack_traces.Frame("user.py", 3, "f"),))]


def in_turn(*actions):
    """Three processes that have run for 5 s, then each action."""

    def happens(processes):
        processes.start(0, 1, 2)
        processes.pass_time(5)
        for action in actions:
            action(processes)

    return happens


def passes(seconds, **states):
    return lambda processes: processes.pass_time(seconds, **states)


def starts(*ranks, **options):
    return lambda processes: processes.start(*ranks, **options)


def sets(**fields):
    return lambda processes: vars(processes).update(fields)


def leaves(rank):
    return lambda processes: processes.followers[rank].watchdog.update(left=True)


def fails(rank, **fields):
    return lambda processes: processes.followers[rank].watchdog.update(failure=Failure("no", **fields))


def boards(fails, *ranks):
    return lambda processes: [setattr(processes.followers[rank].board, "fails", fails) for rank in ranks]


def on_one_host(processes):
    for rank, follower in processes.followers.items():
        follower.watchdog.update(machine="m", pid=100 + rank)


def rank_1_works(processes):
    processes.stacks = dict.fromkeys(range(3), stack())
    for rank in (0, 2):
        processes.followers[rank].watchdog.status.waits[""] = status.OTHER_RANKS


AT_1 = "no progress for 53 s: rank 1 on node1 in step 7; 2 ranks are waiting. The run ends after 1.66667 minutes"
NO_BOARD = "runs/a: status files cannot be read and written for 30 s: Permission denied"
SILENT = "rank {0} on node{0} failed in step 7: sent no sign of life for {1} s"
MISSING = "1 of 3 processes did not start within 60 s: rank 2 (started: rank 0 on node0, rank 1 on node1)"
WAITING = "waiting for rank 2 to start; the run ends after 1 minutes"
OTHER_NAME = "rank 2 on node2 names the coordinator other:1, and this process node0:1: give all"
NO_RANK_0 = "rank 0 did not start at {}:1 within 60 s, or does not share --workdir; "
GONE = "rank {0} on node{0} failed in step 7: exited without a message"


@pytest.mark.parametrize(
    ("happens", "ended", "printed"),
    [
        (in_turn(passes(200)), {}, {}),
        (in_turn(fails(1, code=2), passes(9)), dict.fromkeys(range(3), (7, 2, "rank 1 on node1 failed in step 7: no")), {}),
        (in_turn(leaves(0), passes(2), passes(99, suspended=[0])), {}, {}),
        (in_turn(leaves(1), passes(2), passes(99, suspended=[1])), {}, {}),
        (  # its own file is old, so it judges no process
            in_turn(boards("write", 0), passes(60)),
            dict.fromkeys((1, 2), (26, 1, SILENT.format(0, 20))),
            {0: (NO_BOARD,)},
        ),
        (in_turn(passes(40, suspended=[0])), dict.fromkeys((1, 2), (26, 1, SILENT.format(0, 20))), {}),
        (in_turn(passes(40, suspended=[1])), dict.fromkeys((0, 2), (22, 1, SILENT.format(1, 15))), {}),
        (in_turn(on_one_host, passes(2), sets(dead={1}), passes(9)), dict.fromkeys((0, 2), (9, 1, GONE.format(1))), {}),
        (in_turn(on_one_host, passes(2), sets(dead={0}), passes(9)), dict.fromkeys((1, 2), (8, 1, GONE.format(0))), {}),
        (
            in_turn(rank_1_works, passes(60, idle=range(3)), passes(9), passes(99, idle=range(3))),
            {},
            dict.fromkeys(range(3), (AT_1, "progress resumed", AT_1)),
        ),
        (
            in_turn(rank_1_works, passes(120, idle=range(3))),
            dict.fromkeys(range(3), (105, 1, "rank 1 on node1 failed in step 7: stuck: no progress for 100 s; main thread")),
            dict.fromkeys(range(3), (AT_1,)),
        ),
        (
            in_turn(rank_1_works, boards(True, 1), passes(120, idle=[1])),
            dict.fromkeys((0, 2), (22, 1, SILENT.format(1, 15)))
            | {
                1: (
                    105,
                    1,
                    "rank 1 on node1 failed in step 7: no progress, and no answer of the status files in runs/a, for 100",
                )
            },
            {1: (NO_BOARD,)},
        ),
        (
            in_turn(boards(True, 0, 1, 2), passes(200), boards(False, 0, 1, 2), passes(50)),
            {},
            dict.fromkeys(range(3), (NO_BOARD,)),
        ),
        (
            lambda run: (starts(0, 1)(run), passes(99)(run)),
            dict.fromkeys((0, 1), (60, 1, MISSING)),
            dict.fromkeys((0, 1), (WAITING,)),
        ),
        (lambda run: (starts(1, 2)(run), passes(99)(run)), dict.fromkeys((1, 2), (60, 1, NO_RANK_0.format("node0"))), {}),
        (
            lambda run: (starts(0, 1)(run), starts(2, address="other")(run), passes(99)(run)),
            {0: (60, 1, MISSING), 1: (60, 1, MISSING), 2: (60, 1, NO_RANK_0.format("other") + "rank 0 on node0 names the")},
            dict.fromkeys((0, 1), (WAITING + " (guard.start_minutes); " + OTHER_NAME,)),
        ),
    ],
)
def test_what_three_processes_print_and_when_they_end(monkeypatch, happens, ended, printed):
    run = Processes(monkeypatch)
    happens(run)
    assert {rank: (second, code) for rank, (second, _, code) in run.ended.items()} == {
        rank: (second, code) for rank, (second, code, _) in ended.items()
    }
    for rank, (_, _, text) in ended.items():
        assert run.ended[rank][1].startswith(text)
    for rank, lines in run.printed.items():
        expected = printed.get(rank, ())
        assert tuple(line[: len(start)] for line, start in zip(lines, expected, strict=True)) == expected
    words = {follower.session for follower in run.followers.values()}
    has_all_started = not any("did not start" in text for _, text, _ in run.ended.values())
    assert len(words) == 1
    assert (words != {""}) == has_all_started


def with_clock(monkeypatch, on_sleep=lambda clock: None):
    """The clock of the module, which `time.sleep` moves."""
    clock = [0.0]

    def sleep(seconds):
        clock[0] += seconds
        on_sleep(clock[0])

    for module in (supervisor_module, follower_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    return clock


@pytest.mark.parametrize(
    ("rank", "leave_at", "seconds"),
    [
        (1, {}, 0.02),  # once it has written so
        (0, {1: 1.0, 2: 2.0}, 2.5),  # half a second for other processes to end
        (0, {1: 1.0}, 5.5),  # rank 2 hangs
    ],
)
def test_rank_0_leaves_after_the_others_and_they_at_once(monkeypatch, rank, leave_at, seconds):
    run = Processes(monkeypatch)

    def others_go_on(now):
        for each, follower in run.followers.items():
            if now >= leave_at.get(each, 1e9):
                follower.watchdog.update(left=True)
            follower._follow()

    clock = with_clock(monkeypatch, others_go_on)
    in_turn()(run)
    run.followers[rank].leave()
    assert clock[0] == pytest.approx(seconds, abs=0.05)
    assert run.followers[rank]._written.left


@pytest.mark.parametrize(
    ("collective", "blamed", "end", "waited", "is_ended"),
    [
        (False, None, False, 5, False),
        (False, 2, False, 5, False),
        (False, 2, True, 5, True),
        (False, None, True, 5, False),
        (True, None, False, 25, False),  # 15 s until a process is silent, and 5 s
        (True, 2, False, 25, True),
        (True, 1, False, 25, False),  # this one: it prints its own error
    ],
)
def test_how_long_a_process_that_has_failed_waits_for_a_verdict(monkeypatch, collective, blamed, end, waited, is_ended):
    run, seconds, left = Processes(monkeypatch), [], []
    with_clock(monkeypatch)
    in_turn()(run)
    follower = run.followers[1]
    monkeypatch.setattr(follower, "_decided", SimpleNamespace(wait=seconds.append))
    monkeypatch.setattr(follower, "leave", lambda: left.append(True))
    follower._verdict = None if blamed is None else Verdict("no", blamed, "node")
    follower.fail(Failure("no", collective=collective), end=end)
    assert (seconds, bool(run.ended)) == ([waited], is_ended)
    assert left


def test_rank_0_waits_two_seconds_for_the_reason_of_a_stop_and_names_the_process(monkeypatch):
    run = Processes(monkeypatch)
    clock = with_clock(monkeypatch)
    in_turn()(run)
    for rank, waits in ((1, 0.0), (0, 2.0)):
        clock[0] = 0.0
        assert run.followers[rank].stop_reason_of_others() == "a signal to another process"
        assert clock[0] == pytest.approx(waits, abs=0.06)
    due = run.followers[2]._due
    for reason, is_due in (("SIGTERM", True), ("SIGTERM", False)):  # written at once
        due.clear()
        run.followers[2].set_stop_reason(reason)
        assert due.is_set() == is_due
    run.pass_time(2)
    clock[0] = 0.0
    assert (run.followers[0].stop_reason_of_others(), clock[0]) == ("SIGTERM (rank 2 on node2)", 0.0)


def test_a_process_begins_at_once_without_a_file_and_looks_twice_at_one_of_an_earlier_process(monkeypatch):
    for left, count, looks in ((True, (7, 7, 7), 1), (False, (7, 7, 7), 3), (False, (7, 8, 8), None)):
        run = Processes(monkeypatch)
        run.start(1)
        follower = run.followers[1]
        earlier = replace(follower.watchdog.record, pid=999, left=left)
        wrote = None
        for look, each in enumerate(count, start=1):
            if wrote is None:
                run.texts["1.json"] = replace(earlier, count=each).to_json()
            follower._follow()
            wrote = wrote or (look if follower._written else None)
        assert wrote == looks
        assert bool(follower._verdict) == (looks is None)
        if looks is None:
            assert (follower._verdict.code, run.ended[1][2]) == (2, 2)


def test_five_errors_in_a_row_of_a_watching_thread_end_the_run(monkeypatch):
    for fails, is_exiting, is_ended in (("xxxx.xxxx", False, False), (".xxxxx", False, True), ("xxxxx", True, False)):
        watchdog, ended, printed, waits, left = Watchdog(Limits()), [], [], [], iter(fails)
        watchdog.is_exiting = is_exiting
        monkeypatch.setattr(watchdog, "end", ended.append)
        monkeypatch.setattr(stack_traces, "print_lines", printed.extend)

        def watches(left=left, watchdog=watchdog):
            if (look := next(left, None)) is None:
                watchdog.stopped.set()
            if look == "x":
                raise KeyError("no\nmore")

        watchdog.repeat(watches, partial(waits.append, 1))
        reason = f"the thread {threading.current_thread().name} raised KeyError: 'no\\nmore'"
        assert (len(waits), len(printed)) == (len(fails) + 1, fails.count("x"))
        assert all(line.startswith(f"{reason}; ") and "watches" in line for line in printed)
        said = [f"failed during start-up: {printed[-1]}"] * is_ended  # with the place
        assert [f"{found.reason}; {found.place}" for found in ended] == said
    watchdog.repeat(lambda: ended.append("after the end"), lambda: None)
    stopping = Watchdog(Limits())
    stopping.repeat(lambda: ended.append("after the end"), stopping.stop)
    assert not ended


@pytest.mark.parametrize(
    ("late", "seconds", "is_told"), [(30, 1.0, False), (2, 0.5, False), (30, 15.0, False), (30, 15.5, True)]
)
def test_a_process_that_has_not_run_for_the_limit_of_silence_says_so(monkeypatch, late, seconds, is_told):
    clock, waits, printed = with_clock(monkeypatch), [], []
    clock[0] = 100.0
    watchdog = Watchdog(Limits(late_seconds=late))
    monkeypatch.setattr(stack_traces, "print_lines", printed.extend)
    waited = SimpleNamespace(wait=lambda tick: (waits.append(tick), clock.__setitem__(0, clock[0] + seconds)))
    monkeypatch.setattr(watchdog, "stopped", waited)
    watchdog._sleep()
    assert waits == [0.5 if late == 2 else 1.0]
    cause = "it was suspended, or native code held the GIL"
    assert printed == [f"no thread of this process has run for {seconds:.0f} s: {cause}"] * is_told


@pytest.mark.parametrize(("stuck", "first_look", "late"), [(None, 7.5, LATE), (1800, 7.5, LATE), (20, 5, STUCK)])
def test_stacks_are_taken_from_a_quarter_of_the_time_to_a_report_and_kept_when_it_is_late(monkeypatch, stuck, first_look, late):
    watchdog = Watchdog(Limits(30, stuck))
    watchdog.status, looks = ProcessStatus(), []
    watchdog.status.set_activity("load")
    monkeypatch.setattr(stack_traces, "capture", lambda thread: looks.append(watchdog.status.clock) or stack())
    for _ in range(60):
        watchdog.status.tick(0.5)
        record = watchdog.observe()
        assert (record.overdue, bool(record.stacks)) == ((late, True) if watchdog.status.clock >= 30 else ("", False))
    assert looks == [half / 2 for half in range(int(2 * first_look), 61)]
    assert record.count == 60


STACKS = [stack(name)[0] for name in (stack_traces.MAIN, "decode_0", "compile_0", "checkpoint_0")]
LATE_SAVE = {"background_save": "x", "save_seconds": 53.0}


@pytest.mark.parametrize(
    ("fields", "waits", "place"),
    [
        ({}, "", stack_traces.MAIN),
        ({"waits": status.OTHER_RANKS}, status.OTHER_RANKS, stack_traces.MAIN),
        ({"waits": status.DEVICES}, status.DEVICES, stack_traces.MAIN),
        ({"waits": status.THREAD}, status.THREAD, "decode_0"),
        ({"waits": status.COMPILER}, status.COMPILER, "compile_0"),
        ({"waits": status.SAVE}, status.SAVE, "checkpoint_0"),
        (LATE_SAVE | {"idle_seconds": 0.0}, status.SAVE, "checkpoint_0"),
        (LATE_SAVE | {"waits": status.DEVICES}, status.SAVE, "checkpoint_0"),
        (LATE_SAVE | {"save_seconds": 52.0}, "", stack_traces.MAIN),
        (LATE_SAVE | {"idle_seconds": 29.0, "save_waits": status.OTHER_RANKS}, status.OTHER_RANKS, stack_traces.MAIN),
        (LATE_SAVE | {"save_waits": status.OTHER_RANKS}, "", stack_traces.MAIN),  # it waits, and the training thread hangs
    ],
)
def test_a_late_process_is_where_the_thread_is_that_it_waits_for(monkeypatch, fields, waits, place):
    watchdog, beat = Watchdog(Limits()), status.Heartbeat("step", 7, **{"idle_seconds": 60.0} | fields)
    watchdog.status = SimpleNamespace(heartbeat=lambda: beat, training_thread=None)
    monkeypatch.setattr(stack_traces, "capture", lambda thread: STACKS)
    record = watchdog.observe()
    assert (record.beat.waits, record.place) == (waits, f"{place} at user.py:3 in f")
    monkeypatch.setattr(stack_traces, "capture", lambda thread: [*STACKS, *stack("native thread and 1 more")])
    if waits == status.DEVICES:  # a callback of the compiled program executes code
        assert watchdog.observe().beat.waits == status.CALLBACK
        assert watchdog.record.place == "native thread and 1 more at user.py:3 in f"
    else:
        assert watchdog.observe() == replace(record, count=2, stacks=watchdog.record.stacks)


@pytest.mark.parametrize(
    ("found", "code", "has_stacks"),
    [
        (Verdict("no", 1, "node1"), 1, True),
        (Verdict("no", 0, "node0"), 1, False),  # the process that failed prints its own
        (Verdict("no", 1, "node1", code=2), 2, False),
        (Verdict("no", 0, "node0", code=75), 75, False),
        (Verdict("no", 0, "node0", code=0), 1, False),
    ],
)
def test_a_process_ends_with_the_code_of_the_verdict(monkeypatch, capsys, found, code, has_stacks):
    run, done = Processes(monkeypatch), []
    with_clock(monkeypatch)
    in_turn()(run)
    follower = run.followers[1]
    watchdog = follower.watchdog
    monkeypatch.setattr(supervisor_module.os, "_exit", lambda number: done.append(number))
    monkeypatch.setattr(supervisor_module.faulthandler, "dump_traceback", lambda **_: done.append("stacks"))
    timer = SimpleNamespace(start=lambda: done.append(timer.daemon))
    monkeypatch.setattr(supervisor_module.threading, "Timer", lambda *arguments: done.append(arguments) or timer)
    monkeypatch.setattr(follower, "write_last", lambda: done.append("last"))
    watchdog.before_exit, watchdog.resume_hint = lambda: done.append("before"), "do this"
    Watchdog.end(watchdog, found)
    assert done == [(10.0, os._exit, [code]), True, "before", *["stacks"] * has_stacks, "last", code]
    assert capsys.readouterr().err.splitlines()[-1] == f"jaxdp: {found}; do this"


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_only_a_process_that_waits_alone_is_told_that_the_variables_of_its_launcher_may_be_left_over(monkeypatch, ranks):
    run = Processes(monkeypatch)
    run.start(*ranks)
    run.pass_time(99)
    for text in (*run.printed[0], run.ended[0][1]):
        assert text.endswith(verdict.lone("jax")) == (ranks == (0,))
    assert verdict.lone("jax")


def test_a_silent_process_of_this_host_is_asked_for_its_stacks_which_show_its_place(monkeypatch, tmp_path):
    """Only once it is silent, only on the same host, and only if both see the same directory."""
    killed, dumps, dump = [], [], 'Thread 0x1 (most recent call first):\n  File "user.py", line 3 in f\n'
    clock = with_clock(monkeypatch)
    monkeypatch.setattr(follower_module, "start_time", lambda pid: True)
    monkeypatch.setattr(Watchdog, "dump_stacks_on_signal", lambda watchdog, file: file.close())

    def kill(pid, number):
        killed.append((pid, number, (tmp_path / "1.stacks").read_text()))
        (tmp_path / "1.stacks").write_text(dumps[-1])

    monkeypatch.setattr(follower_module.os, "kill", kill)
    for machine, silent, board, text, place in (
        ("m", 16, Directory(tmp_path), dump, stack_traces.place_of_dump(dump)),
        ("m", 16, Directory(tmp_path), "", "before"),
        ("m", 15, Directory(tmp_path), dump, "before"),
        ("another", 16, Directory(tmp_path), dump, "before"),
        ("m", 16, FailingBoard(), dump, "before"),
    ):
        watchdog = Watchdog(Limits(silence_seconds=15.0))
        watchdog.status = ProcessStatus()
        watchdog.stop()  # its threads end at once
        watchdog.update(machine="m")
        follower = Follower(watchdog, Cluster("jax", "node0", 1, 0, 2), board)
        assert (tmp_path / "0.stacks").exists()
        for count in (1, 2, 2, 2, 2):
            follower._add(1, replace(watchdog.record, rank=1, pid=7, machine=machine, count=count), 0.0)
        (tmp_path / "1.stacks").write_text("of an earlier signal")
        watchdog.status.tick(silent)
        clock[0] = 0.0
        dumps.append(text)
        asked = machine == "m" and silent > 15 and isinstance(board, Directory)
        assert follower._placed(Verdict("no", 1, "node1", place="before")).place == place != ""
        assert (killed, clock[0]) == ([(7, signal.SIGUSR2, "")] * asked, 0.2 * asked)
        assert follower._placed(Verdict("no", place="none")).place == "none"
        killed.clear()


@pytest.mark.parametrize("has_handler", [True, False])
def test_the_signal_for_stacks_writes_them_and_calls_the_handler_of_a_user_if_there_is_one(tmp_path, has_handler):
    calls = []
    before = signal.signal(signal.SIGUSR2, (lambda *_: calls.append(1)) if has_handler else signal.SIG_DFL)
    with open(tmp_path / "stacks", "wb", buffering=0) as file:
        try:
            Watchdog(Limits()).dump_stacks_on_signal(file)
            os.kill(os.getpid(), signal.SIGUSR2)
        finally:
            faulthandler.unregister(signal.SIGUSR2)
            signal.signal(signal.SIGUSR2, before)
    assert len(calls) == has_handler
    assert "in test_the_signal_for_stacks_writes_them" in (tmp_path / "stacks").read_text()


def test_a_watch_lasts_as_long_as_its_outermost_context(monkeypatch):
    monkeypatch.setattr(supervisor_module, "_current", None)
    monkeypatch.setattr(status, "_current", process := ProcessStatus())
    monkeypatch.setattr(Watchdog, "start", lambda watchdog: started.append(watchdog))
    limits, started, process.training_thread = Limits(late_seconds=3), [], None
    with supervisor_module.watch(limits) as outer:
        process.step = 4
        assert (process.activity, process.training_thread, started) == ("start", threading.get_ident(), [outer])
        assert outer.limits == outer._judge.limits == limits
        process.set_activity("load")
        with supervisor_module.watch() as inner:
            assert (inner, inner.limits) == (outer, Limits())
        assert (process.activity, process.step, outer.stopped.is_set()) == ("load", 4, False)
        assert supervisor_module.current() is supervisor_module.current() is outer
    assert (process.activity, process.step, outer.is_watching) == (status.OUTSIDE, None, False)
    assert outer.is_exiting
    assert outer.stopped.is_set()
    assert supervisor_module.current() is not outer
    assert not faulthandler.unregister(signal.SIGUSR2)  # it was


def test_a_process_ends_its_threads_in_a_watch_only_if_it_follows_no_others(monkeypatch):
    monkeypatch.setattr(supervisor_module, "_current", watchdog := Watchdog(Limits()))
    monkeypatch.setattr(watchdog, "start", lambda: None)
    watchdog.status, watchdog.follower = ProcessStatus(), SimpleNamespace()
    with supervisor_module.watch():
        pass
    assert not watchdog.stopped.is_set()
    assert supervisor_module.current() is watchdog
    assert faulthandler.unregister(signal.SIGUSR2)


def test_a_process_that_has_ended_does_not_run_though_its_parent_has_not_noticed():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert [bool(start_time(pid)) for pid in (os.getpid(), child.pid)] == [True, False]
    child.wait()
    assert not start_time(child.pid)


def test_the_limits_without_a_config_are_its_defaults():
    assert supervisor_module.limits_from(Guard()) == Limits()
    assert supervisor_module.limits_from(Guard(step_minutes=None)).stuck_seconds is None


def test_a_run_of_one_process_has_the_limits_of_its_config(tiny, tmp_path):
    limits = []

    class Looks(Callback):
        def on_start(self, run):
            limits.append(supervisor_module.current().limits)

    config = with_parts(tiny, guard={"step_minutes": 7.0})
    train(config, tmp_path, callbacks=[Looks()])
    assert limits == [supervisor_module.limits_from(config.guard)]
    assert limits[0].stuck_seconds == 420
