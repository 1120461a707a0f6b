import itertools
import re
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

from helpers.processes import TIMEOUT, popen
from helpers.step import with_parts

from jaxdp import Callback, train
from jaxdp.distributed import supervisor as supervisor_module
from jaxdp.distributed.launchers import Cluster
from jaxdp.distributed.status import Failure, ProcessStatus
from jaxdp.distributed.supervisor import Follower, Supervisor
from jaxdp.distributed.verdict import LATE, STUCK, Limits

HANGS = """
import threading, time
from jaxdp.distributed import status
from jaxdp.distributed.supervisor import watch
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
print("outside", flush=True)
time.sleep(2)
with watch(limits) as supervisor:
    supervisor.resume_hint = "do this"
    process.set_activity("load", 9, "reading")
    stands_still()
"""
HOLDS_THE_GIL = """
import ctypes, os, signal
from jaxdp.distributed.supervisor import watch
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
    completed = run(f"from jaxdp.distributed.supervisor import *\ncurrent().resume_hint = 'do this'\ncurrent().end({hostile})")
    last = completed.stderr.splitlines()[-1]
    assert last.startswith(r"jaxdp: rank 1 on node failed: a\nb\x1b[2Jccc")
    assert last.endswith("ccc...; do this")
    assert completed.stderr.count("\n") < 20


def test_a_process_finds_out_once_when_it_is_overdue_whether_it_reaches_rank_0(monkeypatch):
    asked = []
    monkeypatch.setattr(Cluster, "reaches_rank0", lambda cluster: asked.append(cluster.rank))
    supervisor = Supervisor(Limits())
    supervisor.stop()  # its threads end at once
    board = SimpleNamespace(name="status files", period_seconds=0.0)
    follower = Follower(supervisor, Cluster("jax", "node0", 1, rank=2, num_processes=3), board)
    for overdue, expected in (("", []), (LATE, [2]), (LATE, [2]), (STUCK, [2, 2]), ("", [2, 2])):
        follower.check_board(replace(supervisor.record, overdue=overdue))
        assert asked == expected
        assert supervisor.record.cut_off == (overdue != "")
    monkeypatch.setattr(follower, "_decided", SimpleNamespace(wait=lambda seconds: None))
    monkeypatch.setattr(follower, "leave", lambda: None)
    for collective in (False, True):
        follower.fail(Failure("no", collective=collective))
        follower.check_board(replace(supervisor.record, overdue=LATE))  # what a failure has found out stays
        assert supervisor.record.cut_off == collective


class SlowBoard:
    """A board of which each access takes 2 s of a clock that it sets. Rank 1 says after 8 s that it leaves."""

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
    supervisor, board = Supervisor(Limits()), SlowBoard()
    supervisor.stop()  # its threads end at once
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: board.clock, sleep=board.sleep))
    follower = Follower(supervisor, Cluster("jax", "node0", 1, rank=0, num_processes=2), board)
    board.rank1 = replace(supervisor.record, rank=1, machine="another")
    for count in (1, 2):
        for record in (supervisor.record, board.rank1):
            follower._add(record.rank, replace(record, count=count), 0.0)
    assert supervisor.exit_seconds == 5.0
    follower._write()
    assert supervisor.exit_seconds == 17.0
    follower.write_last()
    assert follower._records.alive[1].left


class FailingBoard:
    """A board in memory that answers with an error while `fails` is set."""

    name, period_seconds = "status files", 0.0

    def __init__(self):
        self.texts, self.fails = {}, False

    def write(self, name, text):
        self.read(name)
        self.texts[name] = text

    def read(self, name):
        if self.fails:
            raise PermissionError(13, "Permission denied")
        return self.texts.get(name)


def test_a_process_is_not_silent_while_the_directory_does_not_answer():
    supervisor, board, counts = Supervisor(Limits(silence_seconds=15.0)), FailingBoard(), itertools.count()
    supervisor.status = ProcessStatus()
    supervisor.stop()  # its threads end at once
    follower = Follower(supervisor, Cluster("jax", "node0", 1, rank=0, num_processes=2), board)

    def looks(seconds, is_writing=False):
        """The rank that is blamed after that many seconds, with a look in each."""
        for _ in range(seconds):
            if is_writing:
                rank1 = replace(supervisor.record, rank=1, machine="another", count=next(counts))
                board.texts["1.json"] = rank1.to_json()
            supervisor.status.tick(1.0)
            follower._follow()
        return follower._verdict and follower._verdict.rank

    assert looks(5, is_writing=True) is None
    board.fails = True
    assert looks(60) is None
    board.fails = False
    assert looks(13) is None
    assert looks(4) == 1


def test_a_run_of_one_process_has_the_limits_of_its_config(tiny, tmp_path):
    limits = []

    class Looks(Callback):
        def on_start(self, run):
            limits.append(supervisor_module.current().limits)

    config = with_parts(tiny, guard={"step_minutes": 7.0})
    train(config, tmp_path, callbacks=[Looks()])
    assert limits == [supervisor_module.limits_from(config.guard)]
    assert limits[0].stuck_seconds == 420
