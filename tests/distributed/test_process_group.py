"""Exchange of objects by files, without processes."""

import json
from types import SimpleNamespace

import pytest

from jaxdp.distributed.process_group import ALL, NONE, SAVE, STOP, Exchange, JoinedProcesses
from jaxdp.distributed.status import ProcessStatus


def test_a_text_that_is_read_while_it_is_replaced_counts_as_none():
    """A network file system may show the first part of the new text and the second one of the old text: valid JSON, too."""
    written = []
    board = SimpleNamespace(poll_seconds=0, write=lambda name, text: written.append(text), read=lambda name: written[-1])
    follower = SimpleNamespace(board=board, session="a")
    exchange = Exchange(SimpleNamespace(rank=0, is_rank0=True, num_processes=1, follower=follower, status=ProcessStatus()))
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
    exchange = Exchange(SimpleNamespace(rank=1, is_rank0=False, num_processes=2, follower=follower, status=ProcessStatus()))
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
