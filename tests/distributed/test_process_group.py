"""Exchange of objects by files, without processes."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from jaxdp.distributed import process_group
from jaxdp.distributed.process_group import ALL, NONE, SAVE, STOP, JoinedProcesses, ObjectExchange, ProcessGroup
from jaxdp.distributed.status import Failure, ProcessStatus
from jaxdp.distributed.stragglers import StepTimes


def test_a_text_that_is_read_while_it_is_replaced_counts_as_none():
    """A network file system may show the first part of the new text and the second one of the old text: valid JSON, too."""
    written = []
    board = SimpleNamespace(poll_seconds=0, write=lambda name, text: written.append(text), read=lambda name: written[-1])
    follower = SimpleNamespace(board=board, session="a")
    exchange = ObjectExchange(
        SimpleNamespace(rank=0, is_rank0=True, num_processes=1, follower=follower, status=ProcessStatus())
    )
    exchange.all_gather("word", "new" * 100, lambda: None)
    text = written[-1]
    half_old = text[:-40] + text[-40:].replace("new", "old")
    assert json.loads(half_old.partition("\n")[2])["values"]["0 word"]["1"] != ["new" * 100]
    reads = iter([half_old, text[:50], text])
    board.read = lambda name: next(reads)
    assert exchange._wait_for(ALL, "0 word", 1, while_waiting=lambda: None) == ["new" * 100]


@pytest.mark.parametrize("method", ["read", "write"])
def test_a_stop_ends_an_exchange_whose_board_does_not_answer(method):
    def fails(*arguments):
        raise OSError("no answer")

    def stop():
        raise SystemExit("stopped")

    board = SimpleNamespace(poll_seconds=0, write=lambda name, text: None, read=lambda name: None)
    setattr(board, method, fails)
    follower = SimpleNamespace(board=board, session="a")
    exchange = ObjectExchange(
        SimpleNamespace(rank=1, is_rank0=False, num_processes=2, follower=follower, status=ProcessStatus())
    )
    with pytest.raises(SystemExit):
        exchange.all_gather("word", 1, stop)


@pytest.mark.parametrize("later", [[], [NONE], [NONE, NONE, SAVE, NONE]])
def test_an_agreed_save_is_kept_until_it_is_taken_once(later):
    """Steps that complete before it is taken carry no request, as before an evaluation, where several complete together."""
    group = JoinedProcesses.__new__(JoinedProcesses)
    group._request = group._agreed = NONE
    for request in [NONE, SAVE, *later]:
        group.record_request(request)
    assert [group.take_agreed_save() for _ in range(2)] == [True, False]
    group.record_request(NONE)
    assert not group.take_agreed_save()


def test_a_stop_that_was_agreed_is_not_taken_back_by_later_steps():
    group = JoinedProcesses.__new__(JoinedProcesses)
    group._request, group._agreed, group.status = NONE, NONE, ProcessStatus()
    for request in (SAVE, STOP, NONE, SAVE):
        group.record_request(request)
    assert not group.take_agreed_save()
    assert group.check_stop("SIGTERM") == "SIGTERM"


class Board:
    """In memory; `failing` writes and reads fail first."""

    poll_seconds = 0.0

    def __init__(self):
        self.texts, self.failing = {}, 0

    def read(self, name):
        if self.failing:
            self.failing -= 1
            raise OSError("no answer")
        return self.texts.get(name)

    def write(self, name, text):
        self.read(name)
        self.texts[name] = text


def groups_of(processes, board):
    """The groups of the processes of a run on a board, as after `join`."""
    groups = []
    for rank in range(processes):
        group = JoinedProcesses.__new__(JoinedProcesses)
        ProcessGroup.__init__(group)
        done, record = [], SimpleNamespace(failure=None)
        supervising = SimpleNamespace(record=record, stop=lambda rank=rank, done=done: done.append(f"{rank} ends"))
        group.follower = SimpleNamespace(board=board, session="a", watchdog=supervising, failures=done)
        group.follower.fail = lambda failure, end=False, done=done: done.append((failure.reason, failure.code, end))
        group.follower.leave = lambda done=done: done.append("leaves")
        group.follower.set_stop_reason = lambda reason, done=done: done.append(reason)
        group.follower.stop_reason_of_others = lambda: "SIGINT (rank 1 on node1)"
        group.follower.step_times = {each: StepTimes(2, 2.0, 1.0) for each in range(processes)}
        group.rank, group.num_processes, group.hosts = rank, processes, [f"node{each}" for each in range(processes)]
        group.status, group._exchange, group._while_waiting = ProcessStatus(), ObjectExchange(group), lambda: None
        group._begin_run()
        groups.append(group)
    return groups


def of_all(groups, function):
    """The results of a function of every group, called in threads."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [future.result(60) for future in [pool.submit(function, group) for group in groups]]


def test_every_process_has_the_values_of_all_by_rank_whenever_and_in_whatever_run(monkeypatch):
    """Also if the board fails at times, and if processes have begun different operations before the run."""
    monkeypatch.setattr(process_group, "RETRY_SECONDS", 0)
    board = Board()
    groups = groups_of(3, board)
    for run in range(4):
        for number in range(4):
            board.failing = 3
            gathered = of_all(groups, lambda group, at=(run, number): group.all_gather_object("x", [group.rank, *at]))
            assert gathered == [[[rank, run, number] for rank in range(3)]] * 3
            assert of_all(groups, lambda group, n=number: group.broadcast_object("y", [group.rank, n])) == [[0, number]] * 3
        held = [json.loads(text.partition("\n")[2])["values"] for text in board.texts.values()]
        names = {f"{each} {name}" for each in (run - 1, run) if each >= 0 for name in "xy"}
        assert [set(each) for each in held] == [names] * 4  # what a slower process may still read
        assert {tuple(values) for each in held for values in each.values()} == {("3", "4")}
        for group in groups:
            group.attach(before_exit=lambda: None, while_waiting=lambda: None)


def test_a_value_of_another_session_is_not_taken_for_one_of_this():
    board = Board()
    (earlier,), (group,) = groups_of(1, board), groups_of(1, board)
    earlier.all_gather_object("x", 1)
    group.follower.session = "b"

    def looks_again():
        raise SystemExit

    with pytest.raises(SystemExit):
        group._exchange._wait_for(ALL, "0 x", 1, while_waiting=looks_again)
    assert group.all_gather_object("x", 2) == [2]


def test_a_single_process_decides_for_itself():
    group = ProcessGroup()
    assert (group.rank, group.num_processes, group.hosts, group.host_numbers) == (0, 1, ["localhost"], [0])
    assert group.set_activity == group.status.set_activity
    assert (group.is_rank0, group.all_gather_object("x", 3), group.broadcast_object("x", 4)) == (True, [3], 4)
    assert (group.request_save(), group.take_agreed_save(), group.take_request("SIGTERM")) == (True, False, NONE)
    assert (group.check_stop(None), group.check_stop("SIGTERM"), group.failure) == (None, "SIGTERM", None)
    assert group.straggler_report() == {}


def test_a_request_is_taken_once_and_a_stop_goes_before_a_save():
    (group,) = groups_of(1, Board())
    assert not group.request_save()
    assert [group.take_request(None), group.take_request(None)] == [SAVE, NONE]
    group.request_save()
    assert [group.take_request("SIGTERM"), group.take_request("SIGTERM"), group.take_request(None)] == [STOP, STOP, NONE]
    assert group.follower.failures == ["SIGTERM"] * 2


@pytest.mark.parametrize("reason", [None, "SIGTERM"])
def test_a_stop_before_the_first_step_is_at_once_and_later_when_all_have_agreed(reason):
    (group,) = groups_of(1, Board())
    assert group.check_stop(reason) == reason
    assert group.follower.failures == ([(reason, 75, False)] if reason else [])
    group.take_request(None)
    assert group.check_stop(reason) is None
    group.record_request(SAVE)
    assert group.check_stop(reason) is None
    group.record_request(STOP)
    assert group.check_stop(reason) == (reason or "SIGINT (rank 1 on node1)")
    assert group.status.position == (1, 0, 0)
    group.attach(before_exit=lambda: None, while_waiting=lambda: None)  # the next run
    assert group.check_stop(None) is None
    assert len(group.follower.failures) == bool(reason)


def test_only_rank_0_reports_stragglers():
    reports = [group.straggler_report() for group in groups_of(2, Board())]
    assert [each["host"] for each in reports[0]["slowest"]] == ["node0", "node1"]
    assert reports[1] == {}
    assert [group.is_rank0 for group in groups_of(2, Board())] == [True, False]


@pytest.mark.parametrize("failed", [False, True])
def test_a_process_leaves_once_all_are_done_unless_it_has_failed(failed):
    groups = groups_of(2, Board())
    for group in groups:
        group.follower.watchdog.record.failure = Failure("no") if failed else None
    of_all(groups, lambda group: group.close())
    assert [group.follower.failures for group in groups] == [["leaves", "0 ends"], ["leaves", "1 ends"]]
    assert bool(groups[0].follower.board.texts) != failed


def test_the_end_of_a_run_waits_ten_seconds_for_a_directory_that_does_not_answer(monkeypatch):
    clock, (group,) = [0.0], groups_of(1, Board())
    sleep = lambda seconds: clock.__setitem__(0, clock[0] + seconds)  # noqa: E731
    monkeypatch.setattr(process_group, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    group.follower.board.failing = 10**6
    group.close()
    assert clock[0] == 11.0
    assert group.follower.failures == ["leaves", "0 ends"]


def test_a_process_ends_after_it_has_ended_the_others(monkeypatch):
    (group,), waited = groups_of(1, Board()), []
    monkeypatch.setattr(process_group, "time", SimpleNamespace(sleep=waited.append))
    group.abort("forced")
    assert (group.follower.failures, waited) == ([("forced", 1, True)], [60.0])


def test_who_is_told_while_it_waits():
    """The main thread before the first step, and at barriers: a stop of one process only is no danger there."""
    (group,) = groups_of(1, Board())
    group._exchange, waits, mine = SimpleNamespace(begin_run=lambda: None), [], lambda: None
    group._exchange.all_gather = lambda name, value, while_waiting: waits.append(while_waiting is mine)
    group.attach(before_exit=lambda: None, while_waiting=mine)
    group.all_gather_object("x", 1)
    of_all([group], lambda group: group.all_gather_object("x", 1))
    group.all_gather_object("x", 1, lambda: None)
    group.take_request(None)
    group.all_gather_object("x", 1)
    group.barrier("y")
    assert waits == [True, False, False, False, True]
