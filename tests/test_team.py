"""The line between the processes of a run; here they are threads of one process."""

import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxdp.parallel.cluster import Cluster
from jaxdp.parallel.stragglers import Stragglers, in_words
from jaxdp.parallel.team import Team
from jaxdp.parallel.team import in_words as verdict_in_words
from jaxdp.parallel.team_server import TeamServer

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


def hello(port, rank, processes):
    """A line to rank 0 by hand."""
    line = socket.create_connection(("127.0.0.1", port), 5)
    line.sendall(f'{{"rank": {rank}, "processes": {processes}, "host": "h", "identity": "e", "gpus": []}}\n'.encode())
    return line


@pytest.mark.parametrize(
    ("rank", "processes", "reason"),
    [(1, 3, "is rank 1 already"), (2, 4, "as one of 4 processes"), (7, 3, "there is no rank 7")],
)
def test_before_all_have_come_a_process_that_does_not_fit_ends_the_start(free_port, rank, processes, reason):
    TeamServer("127.0.0.1", free_port, 3, 100 * SECONDS, 100 * SECONDS, None)
    with hello(free_port, 1, 3) as first, hello(free_port, rank, processes) as second:
        assert reason in second.recv(4096).decode()
        told = first.recv(4096).decode()
        while "verdict" not in told:
            told += first.recv(4096).decode()
        assert reason in told


@pytest.mark.parametrize(("rank", "processes"), [(1, 2), (1, 4), (5, 2)])
def test_a_complete_run_goes_on_whoever_comes(teams, free_port, rank, processes):
    members = teams(2)
    with hello(free_port, rank, processes) as stranger:
        assert b"verdict" in stranger.recv(4096)
    assert everywhere(members, lambda one: one.exchange("still", one.rank)) == [[0, 1]] * 2


@pytest.fixture
def verdicts(monkeypatch):
    """What members that end have heard, in place of their end; every thread counts as its process's main one."""
    heard = []
    monkeypatch.setattr(Team, "_end", lambda one: heard.append(one.verdict))
    monkeypatch.setattr("jaxdp.parallel.team.threading.main_thread", threading.current_thread)
    return heard


def heard_by_all(heard, number=2):
    deadline = time.monotonic() + SECONDS
    while len(heard) < number and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(heard) == number
    return verdict_in_words(heard[0])


@pytest.mark.parametrize("kind", ["exchange", "share"])
def test_processes_that_wait_for_different_things_end_and_say_for_which(verdicts, teams, kind):
    members = teams(2)
    one = threading.Thread(target=members[0].exchange, args=("apples", 1), daemon=True)
    two = threading.Thread(target=getattr(members[1], kind), args=("pears", 1), daemon=True)
    one.start(), two.start()
    told = heard_by_all(verdicts)
    awaited = "pears" if kind == "exchange" else "rank 0's pears"
    assert told.startswith("rank 1 on ")
    assert told.endswith(f"it waits for {awaited} and rank 0 for apples: they do different things")
    for member in members:
        member.failing = True


def test_a_process_that_waits_for_others_stops_with_them(teams, monkeypatch):
    """One waits in an exchange, the other stops where it is, which it would not do before coming there."""
    monkeypatch.setattr("jaxdp.parallel.team.threading.main_thread", threading.current_thread)
    members, stopped = teams(2), []

    def look(one):
        if one.agreed_here("SIGTERM" if one.rank == 1 else None):
            raise InterruptedError

    def run(one):
        one.look = lambda: look(one)
        try:
            if one.rank == 0:
                one.exchange("what the other never gives", None)
            while True:
                time.sleep(0.05)
                one.look()
        except InterruptedError:
            stopped.append(one.rank)

    everywhere(members, run)
    assert sorted(stopped) == [0, 1]


def test_one_that_is_asked_to_stop_before_all_have_come_lets_the_others_stop_too(free_port):
    TeamServer("127.0.0.1", free_port, 3, 100 * SECONDS, 100 * SECONDS, None)

    def look():
        raise InterruptedError("SIGTERM")

    with hello(free_port, 2, 3) as other:
        with pytest.raises(InterruptedError):
            Team(Cluster("test", "127.0.0.1", free_port, 1, 3), SECONDS, SECONDS, [], look)
        told = ""
        while "verdict" not in told:
            told += other.recv(4096).decode()
    verdict = next(json.loads(line)["verdict"] for line in told.splitlines() if "verdict" in line)
    assert verdict["code"] == 75
    assert verdict_in_words(verdict) == f"rank 1 on {socket.gethostname()} was stopped in phase start: SIGTERM"


def test_what_is_no_rank_0_is_noticed(verdicts, free_port):
    with socket.create_server(("127.0.0.1", free_port)) as other:

        def answer():
            line, _ = other.accept()
            with line:
                line.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                time.sleep(1)

        threading.Thread(target=answer, daemon=True).start()

        def look():
            if verdicts:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            Team(Cluster("test", "127.0.0.1", free_port, 1, 2), SECONDS, SECONDS, [], look)
    assert "what answers at 127.0.0.1 sends what cannot be understood" in verdict_in_words(verdicts[0])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_rank_0_is_reached_by_both_internet_protocols(free_port):
    server = TeamServer("some.host", free_port, 2, 100 * SECONDS, SECONDS, None)
    for address in ("127.0.0.1", "::1"):
        socket.create_connection((address, free_port), 5).close()
    assert server.listener.family == socket.AF_INET6


def test_a_failure_is_told_with_what_was_saved_meanwhile():
    verdict = {
        "rank": 1,
        "host": "h",
        "place": {"phase": "step", "step": 9, "saving": "the checkpoint of 64 samples"},
        "code": 1,
        "reason": "killed",
    }
    assert verdict_in_words(verdict) == "rank 1 on h failed in phase step, step 9, saving the checkpoint of 64 samples: killed"


def test_strangers_at_the_port_do_no_harm(teams, free_port):
    members = teams(2)
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"rank": "x"}\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n", b""):
        with socket.create_connection(("127.0.0.1", free_port), 5) as stranger:
            stranger.sendall(text)
    assert everywhere(members, lambda one: one.exchange("still", one.rank)) == [[0, 1]] * 2


def test_a_port_in_use_is_one_line(free_port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port))
        other.listen()
        with pytest.raises(OSError, match=f"rank 0 cannot listen at port {free_port} .*give another port"):
            Team(Cluster("test", "127.0.0.1", free_port, 0, 2), 1, SECONDS, [])


def test_a_rank_0_that_never_comes_is_one_line(free_port, monkeypatch):
    monkeypatch.setattr("jaxdp.parallel.team.CONNECT_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=r"rank 1 on .*: rank 0 does not answer at 127\.0\.0\.1"):
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


def test_rank_0_waits_at_the_end_for_those_that_are_still_there(verdicts, teams):
    first, other = teams(2)
    began = time.monotonic()
    threading.Timer(0.5, other.socket.shutdown, [socket.SHUT_RDWR]).start()
    first._let_the_others_go()
    assert 0.4 < time.monotonic() - began < 4
    assert first.server.only_silent_left
    first.failing = other.failing = True
