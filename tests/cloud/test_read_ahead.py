"""Items are fetched in the order of the requests to come, and only so many ahead."""

import threading
from concurrent import futures

import numpy as np
import pytest
from helpers.processes import wait_until

from jaxdp.cloud import read_ahead
from jaxdp.cloud.read_ahead import Daemons, ReadAhead


class Source:
    """Fetches squares; records the order."""

    def __init__(self):
        self.fetched = []

    def fetch(self, index):
        self.fetched.append(index)
        return index**2


def test_items_are_fetched_ahead_in_order_and_once(monkeypatch):
    monkeypatch.setattr(read_ahead, "ITEMS", 10)
    source = Source()
    ahead = ReadAhead(source.fetch, lambda index: 1, Daemons(1))
    order = np.random.default_rng(0).permutation(40)
    ahead.follow(np.split(order, 8))
    seen = []
    for number, index in enumerate(order.tolist()):
        seen.append(ahead[index])
        assert len(source.fetched) <= number + 1 + 10
    assert seen == [index**2 for index in order.tolist()]
    assert source.fetched == order.tolist()


def test_an_item_that_is_asked_for_several_times_is_fetched_once_and_the_order_may_change():
    source = Source()
    ahead = ReadAhead(source.fetch, lambda index: 1, Daemons(4))
    assert ahead[7] == 49  # unexpected
    ahead.follow([np.arange(5)])
    ahead.follow([np.arange(5, 10)])
    assert [ahead[index] for index in (9, 0, 5, 6)] == [81, 0, 25, 36]
    ahead = ReadAhead((source := Source()).fetch, lambda index: 1, Daemons(4))
    ahead.follow([np.array([3, 3, 0, 0, 0])])
    assert [ahead[index] for index in (3, 0, 0, 3, 0)] == [9, 0, 0, 9, 0]
    assert sorted(source.fetched) == [0, 3]
    assert (ahead.items, ahead.bytes, ahead.pending) == (0, 0, {})


def test_bytes_limit_what_is_fetched_ahead(monkeypatch):
    monkeypatch.setattr(read_ahead, "BYTES", 100)
    source = Source()
    daemons, together = Daemons(4), threading.Barrier(4)
    ahead = ReadAhead(source.fetch, lambda index: 30, daemons)
    ahead.follow([np.arange(50)])
    ahead[0]
    futures.wait([daemons.submit(together.wait, 60) for _ in range(4)])  # no thread fetches any longer
    assert sorted(source.fetched) == [0, 1, 2, 3, 4]


def test_as_many_items_are_fetched_at_a_time_as_there_are_threads():
    """No fetch returns before 63 others have begun."""
    together = threading.Barrier(64)
    ahead = ReadAhead(lambda index: (together.wait(60), index**2)[1], lambda index: 1, Daemons(64))
    ahead.follow([np.arange(512)])
    assert [ahead[index] for index in range(512)] == [index**2 for index in range(512)]


def test_errors_of_a_fetch_are_raised_where_the_item_is_asked_for():
    def fetch(index):
        raise ValueError(f"no item {index}")

    ahead = ReadAhead(fetch, lambda index: 1, Daemons(2))
    ahead.follow([np.arange(3)])
    with pytest.raises(ValueError, match="no item 1"):
        ahead[1]


def test_stop_releases_threads_that_wait_for_an_item_or_ask_later(monkeypatch):
    release = threading.Event()
    ahead = ReadAhead(lambda index: release.wait(30), lambda index: 1, Daemons(3))
    threading.Timer(0.1, ahead.stop).start()
    with pytest.raises(InterruptedError):
        ahead[1]
    monkeypatch.setattr(read_ahead, "STOPPED_SECONDS", 0.2)
    with pytest.raises(InterruptedError):
        ahead[2]
    release.set()
    assert ahead[3]


@pytest.mark.parametrize("end", [ReadAhead.stop, lambda ahead: ahead.follow([])])
def test_fetches_that_have_not_begun_are_dropped_at_the_end_of_an_order(end):
    begun, release, fetched = threading.Event(), threading.Event(), []

    def fetch(index):
        fetched.append(index)
        begun.set()
        return release.wait(30)

    daemons = Daemons(1)
    ahead = ReadAhead(fetch, lambda index: 1, daemons)
    ahead.follow([np.arange(50)])
    assert begun.wait(30)
    end(ahead)
    release.set()
    daemons.submit(lambda: None).result(timeout=30)  # follows what the thread had been asked for
    assert fetched == [0]


def test_a_thread_that_waits_for_a_dropped_fetch_raises():
    begun, release = threading.Event(), threading.Event()

    def fetch(index):
        begun.set()
        return release.wait(30)

    ahead, errors = ReadAhead(fetch, lambda index: 1, Daemons(1)), []
    ahead.follow([np.array([0, 1, 1])])  # 1 stays expected while a thread waits for it
    assert begun.wait(30)

    def ask():
        try:
            ahead[1]
        except InterruptedError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: ahead.items != 3)
    ahead.follow([])
    thread.join(timeout=30)
    assert len(errors) == 1
    release.set()


def test_threads_without_work_end_and_others_take_their_place(monkeypatch):
    monkeypatch.setattr(read_ahead, "IDLE_SECONDS", 0.05)
    daemons, before = Daemons(8), threading.active_count()
    for _ in range(2):
        assert [future.result(timeout=60) for future in [daemons.submit(pow, 2, number) for number in range(20)]][-1] == 2**19
        wait_until(lambda: not daemons.started and threading.active_count() <= before)
