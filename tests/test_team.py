"""The line between the processes of a run; here they are threads of one process."""

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxdp.config import ConfigError
from jaxdp.parallel.cluster import Cluster
from jaxdp.parallel.stragglers import Stragglers, in_words
from jaxdp.parallel.team import Team
from jaxdp.parallel.team import in_words as verdict_in_words

SECONDS = 60.0


@pytest.fixture
def teams(free_port):
    """together(n): n members of a team, by rank."""
    made = []

    def together(number: int) -> list[Team]:
        def join(rank):
            return Team(Cluster("test", "127.0.0.1", free_port, rank, number), SECONDS, SECONDS, [])

        with ThreadPoolExecutor(number) as threads:
            made.extend(threads.map(join, range(number)))
        return made

    yield together
    everywhere(made, lambda one: one.close())


def everywhere(teams, work):
    with ThreadPoolExecutor(max(1, len(teams))) as threads:
        return list(threads.map(work, teams))


def test_all_know_all(teams):
    for rank, one in enumerate(teams(4)):
        assert (one.rank, one.processes, one.first) == (rank, 4, rank == 0)
        assert one.hosts == [socket.gethostname()] * 4
        assert (one.local_rank, one.local_processes, one.host_numbers) == (rank, 4, [0] * 4)


def test_values_are_exchanged_and_shared_in_turn(teams):
    members = teams(3)
    for turn in range(3):
        assert (
            everywhere(members, lambda one, turn=turn: one.exchange("a", [one.rank, turn]))
            == [[[rank, turn] for rank in range(3)]] * 3
        )
        assert everywhere(members, lambda one, turn=turn: one.share("b", f"{one.rank} {turn}")) == [f"0 {turn}"] * 3


def test_what_rank_0_shares_early_waits_for_the_others(teams):
    members = teams(2)
    assert members[0].share("early", 5) == 5
    time.sleep(0.1)
    assert members[1].share("early", None) == 5


def test_a_large_value_comes_whole(teams):
    text = "x" * 3_000_000
    assert everywhere(teams(2), lambda one: one.exchange("large", text)) == [[text, text]] * 2


@pytest.mark.parametrize("seed", range(5))
def test_all_stop_at_the_same_point_however_far_each_has_got(teams, seed):
    """Members pass points at their own pace, never more than two apart, as collectives hold them; one is asked to stop."""
    members, draw = teams(3), random.Random(seed)
    passed, lock = [0] * 3, threading.Condition()
    asked_at, victim = draw.randrange(3, 20), draw.randrange(3)
    pauses = [[draw.random() * 0.01 for _ in range(200)] for _ in range(3)]

    def run(one):
        while True:
            agreed = one.point("SIGTERM" if one.rank == victim and passed[one.rank] >= asked_at else None)
            if agreed:
                assert agreed["what"] == "stop"
                return passed[one.rank], agreed["why"]
            with lock:
                passed[one.rank] += 1
                lock.notify_all()
                lock.wait_for(lambda: passed[one.rank] - min(passed) <= 2, SECONDS)
            time.sleep(pauses[one.rank][passed[one.rank] % 200])

    ended = everywhere(members, run)
    assert len({points for points, _ in ended}) == 1
    assert ended[0][0] >= asked_at
    assert ended[0][1] == f"SIGTERM to rank {victim} on {socket.gethostname()}"


def test_a_save_that_one_asks_for_is_agreed_on_and_the_run_goes_on(teams):
    members = teams(2)

    def run(one):
        saved = []
        for point in range(60):
            if one.rank == 1 and point in (5, 30):
                one.ask("save")
            while agreed := one.point(None):
                assert agreed["what"] == "save"
                saved.append(point)
            one.exchange("step", point)  # both in step
        return saved

    first, second = everywhere(members, run)
    assert first == second
    assert len(first) == 2


def test_two_processes_of_one_rank_are_refused(teams, free_port, capfd, monkeypatch):
    members = teams(2)
    ended = []
    for one in members:
        monkeypatch.setattr(one, "_end", lambda one=one: ended.append(one.verdict))
    third = socket.create_connection(("127.0.0.1", free_port), 5)
    third.sendall(b'{"rank": 1, "processes": 2, "host": "elsewhere", "identity": "e", "gpus": []}\n')
    assert b"is rank 1 already" in third.recv(4096)
    third.close()
    deadline = time.monotonic() + SECONDS
    while len(ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "is rank 1 already" in verdict_in_words(ended[0])
    for one in members:
        one.failing = True


def test_strangers_at_the_port_do_no_harm(teams, free_port):
    members = teams(2)
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"rank": "x"}\n', b"\xff\xfe\n", b""):
        with socket.create_connection(("127.0.0.1", free_port), 5) as stranger:
            stranger.sendall(text)
    assert everywhere(members, lambda one: one.exchange("still", one.rank)) == [[0, 1]] * 2


def test_a_port_in_use_is_one_line(free_port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port))
        other.listen()
        with pytest.raises(ConfigError, match=f"rank 0 cannot listen at port {free_port} .*give another port"):
            Team(Cluster("test", "127.0.0.1", free_port, 0, 2), 1, SECONDS, [])


def test_a_rank_0_that_never_comes_is_one_line(free_port, monkeypatch):
    monkeypatch.setattr("jaxdp.parallel.team.CONNECT_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"rank 1 on .*: rank 0 does not answer at 127\.0\.0\.1"):
        Team(Cluster("test", "127.0.0.1", free_port, 1, 2), 0.3, SECONDS, [])


def test_waiting_is_the_time_from_being_ready_to_the_last_being_ready():
    """By hand: three processes, steps of 1 s, the third always asks 0.25 s after the step before is done."""
    one = Stragglers(3)
    end = 0.0
    for step in range(1, 11):
        asked = [end - 0.5, end + 0.05, end + 0.25]  # the first asks before the step before is done: ready when it is
        one.include(step, asked, [end + 1.0, end + 1.01, end + 1.02])
        end += 1.0
    found = one.report(["a", "b", "c"])
    waits = np.mean([0.25, 0.20, 0.0])
    assert found["waiting_share"] == pytest.approx(waits / 1.0)
    assert found["slowest"][0]["rank"] == 2
    assert found["slowest"][0]["host"] == "c"
    assert found["slowest"][0]["last_share"] == 1.0
    assert found["slowest"][0]["late_seconds"] == pytest.approx(0.25 - 0.05)  # than the usual one, the median
    assert "rank 2 on c (200 ms late a step, the last in 100 % of them)" in in_words(found)
    assert one.report(["a", "b", "c"]) == {}
    assert one.report(["a", "b", "c"], whole=True) == found


def test_steps_that_do_not_follow_one_another_are_left_out():
    """Between them an evaluation or a save has passed, of which nobody waits for a straggler."""
    one = Stragglers(2)
    one.include(1, [0.0, 0.0], [1.0, 1.0])
    one.include(5, [1.0, 9.0], [10.0, 10.0])
    assert one.report(["a", "b"]) == {}
