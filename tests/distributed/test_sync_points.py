import random
import threading
import time

import pytest
from helpers.control import HOST, SECONDS, eventually, on_all

from jaxdp.distributed import sync_points


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_request_stops_all_processes_at_the_same_sync_point(clients, seed):
    """Processes pass sync points at random speeds, at most two apart, as collectives keep them; one is asked to stop."""
    members, draw = clients(3), random.Random(seed)
    passed, lock = [0] * 3, threading.Condition()
    requested_at, requester = draw.randrange(3, 20), draw.randrange(3)
    pauses = [[draw.random() * 0.01 for _ in range(200)] for _ in range(3)]

    def run(client):
        while True:
            stop_reason = "SIGTERM" if client.rank == requester and passed[client.rank] >= requested_at else None
            if agreement := client.sync_point(stop_reason):
                assert agreement.action == "stop"
                return passed[client.rank], agreement.reason
            with lock:
                passed[client.rank] += 1
                lock.notify_all()
                lock.wait_for(lambda: passed[client.rank] - min(passed) <= 2, SECONDS)
            time.sleep(pauses[client.rank][passed[client.rank] % 200])

    stops = on_all(members, run)
    assert len({points for points, _ in stops}) == 1
    assert stops[0][0] >= requested_at
    assert stops[0][1] == f"SIGTERM to rank {requester} on {HOST}"


def test_a_hold_during_pass_next_is_answered_with_the_point_being_passed(monkeypatch):
    """Answered with the point before, this process went one step further than the others, and all hung."""
    changed, sent, wait_until = threading.Condition(), [], sync_points.wait_until
    points = sync_points.SyncPoints(changed, sent.append)

    def wait_then_hold(*arguments):
        wait_until(*arguments)
        pausing = threading.Thread(target=points.handle_pause)
        pausing.start()
        pausing.join(0.5)

    monkeypatch.setattr(sync_points, "wait_until", wait_then_hold)
    points.pass_next()
    deadline = time.monotonic() + SECONDS
    while {"paused_at": 1} not in sent:
        assert {"paused_at": 0} not in sent
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stop_request_behind_a_save_request_stops_processes_that_wait(clients):
    """None of them reaches the sync point of the save before it has stopped."""
    members = clients(2)
    members[1].request("save")

    def run(client):
        deadline = time.monotonic() + SECONDS
        while (agreement := client.check_stop("SIGTERM" if client.rank == 0 else None)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return agreement.action

    assert on_all(members, run) == ["stop", "stop"]
    assert [client.sync_point(None) for client in members] == [None, None]  # the save is dropped: a stop saves too


def test_a_save_agreed_while_one_process_waits_saves_on_all_processes_at_the_same_sync_point(clients):
    members = clients(2)
    for client in members:
        for _ in range(3):
            client.sync_point(None)
    members[1].request("save")
    eventually(lambda: all(client.sync_points._agreed for client in members))
    assert members[0].check_stop(None) is None  # it waits; the other does not
    for client in members:
        assert client.sync_point(None).action == "save"
        assert client.sync_point(None) is None


def test_a_stop_requested_after_a_save_stops_all_processes_at_the_same_step(clients):
    """Rank 0 waits when the save is agreed, and rank 1 takes it one step later."""
    members, steps = clients(2), [0, 0]
    members[1].request("save")
    eventually(lambda: all(client.sync_points._agreed for client in members))
    assert members[0].check_stop(None) is None
    assert members[1].sync_point(None).action == "save"
    steps[1] += 1

    def run(client):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if client.check_stop("SIGTERM" if client.rank == 1 else None):
                return steps[client.rank]
            if client.rank == 0 and steps[0] == 0:
                time.sleep(0.5)
                agreement = client.sync_point(None)
                if agreement and agreement.action == "stop":
                    return steps[0]
                steps[0] += 1
            time.sleep(0.01)
        raise TimeoutError

    assert on_all(members, run) == [1, 1]


def test_a_save_request_saves_on_all_processes_at_the_same_sync_point(clients):
    members = clients(2)

    def run(client):
        saved = []
        for point in range(60):
            if client.rank == 1 and point in (5, 30):
                client.request("save")
            while agreement := client.sync_point(None):
                assert agreement.action == "save"
                saved.append(point)
            client.all_gather_object("step", point)
        return saved

    first, second = on_all(members, run)
    assert first == second
    assert len(first) == 2


def test_coordinator_serves_a_save_that_is_requested_again_before_all_have_acted_on_the_last():
    """It was dropped, and the process that had requested it waited for it until the end of the run."""
    sent = []
    coordinator = sync_points.SyncPointCoordinator(2, sent.append)
    coordinator.add_request("save", "")
    for rank in (0, 1):
        coordinator.add_count(rank, 3)
    coordinator.add_done(0, "save")
    coordinator.add_request("save", "")
    coordinator.add_done(1, "save")
    assert sent.count({"pause": "save"}) == 2


def test_coordinator_drops_a_second_request_to_stop():
    sent = []
    coordinator = sync_points.SyncPointCoordinator(2, sent.append)
    for reason in ("SIGTERM to rank 0", "SIGTERM to rank 1"):
        coordinator.add_request("stop", reason)
    for rank in (0, 1):
        coordinator.add_count(rank, 3)
    coordinator.add_request("stop", "SIGINT to rank 1")
    for rank in (0, 1):
        coordinator.add_done(rank, "stop")
    assert sent.count({"pause": "stop"}) == 1


def test_a_save_deferred_while_waiting_is_not_requested_again():
    sent = []
    points = sync_points.SyncPoints(threading.Condition(), sent.append)
    points.request("save", "")
    points.handle_pause()
    points.handle_agreed(0, sync_points.Agreement("save", ""))
    assert points.check_stop() is None  # between two sync points: the next one acts on it
    points.request("save", "")
    assert points.pass_next().action == "save"
    assert [message for message in sent if "request" in message] == [{"request": "save", "reason": ""}]
    points.request("save", "")
    assert sent[-1] == {"request": "save", "reason": ""}


def test_wait_until_the_conditihandle_pauses_calls_nothing_afterwards():
    changed, calls, states = threading.Condition(), [], iter([False, False, True, True])
    threading.Timer(0.05, lambda: changed.acquire() and (changed.notify_all(), changed.release())).start()
    sync_points.wait_until(changed, lambda: next(states), lambda: calls.append(1))
    assert len(calls) == 1


def test_a_stop_reached_while_waiting_can_be_requested_again():
    sent = []
    points = sync_points.SyncPoints(threading.Condition(), sent.append)
    for sync_point in range(2):  # a program that catches `Stopped` trains again
        points.request("stop", "SIGTERM")
        points.handle_pause()
        points.handle_agreed(0, sync_points.Agreement("stop", "SIGTERM"))
        assert points.check_stop().action == "stop", sync_point
    assert [message for message in sent if "request" in message] == 2 * [{"request": "stop", "reason": "SIGTERM"}]
