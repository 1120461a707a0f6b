import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.attacks import ATTACKS, LOCATION, attack
from helpers.control import (
    SECONDS,
    close_all,
    connect_by_hand,
    eventually,
    join_all,
    on_all,
    receive,
    receive_failure,
    start_server,
)

from jaxdp.distributed import handshake
from jaxdp.distributed.failure import FailureHandler
from jaxdp.distributed.pending_connections import max_pending
from jaxdp.distributed.status import ProcessStatus
from jaxdp.errors import ConfigError

TINY = [
    *("--data.source", "synthetic", "--data.image-size", "8", "--data.train-examples", "64", "--data.eval-examples", "37"),
    *("--model.depth", "18", "--model.width", "2", "--model.stem", "small", "--epochs", "3", "--optimizer.name", "sgd"),
    *("--schedule.learning-rate", "0.002", "--schedule.warmup-epochs", "1", "--batch.0.global-batch", "8"),
    *("--batch.0.until-epoch", "2", "--batch.1.global-batch", "16", "--logging.no-tensorboard"),
]
HEARTBEAT = asdict(ProcessStatus().heartbeat())


@pytest.fixture
def logged():
    return []


@pytest.fixture
def server(free_port, logged):
    """Rank 0's server of a run of two, without a client on rank 0."""
    return start_server(free_port, info=logged.append)


@pytest.fixture
def exits(monkeypatch):
    """The failures for which clients exit, which is recorded instead."""
    failures = []
    monkeypatch.setattr(FailureHandler, "exit", lambda handler: failures.append(handler.failure))
    return failures


def test_attacks_during_the_start_are_refused_and_counted_and_the_run_starts(server, free_port, logged):
    first = connect_by_hand(free_port, 1)
    for text in ATTACKS.values():
        attack(free_port, text)
    eventually(lambda: server.refused_connections == len(ATTACKS))
    assert server.failure is None
    assert list(server.clients) == [1]
    second = connect_by_hand(free_port, 0)
    for connection in (first, second):
        assert [member["rank"] for member in receive(connection, "members")["members"]] == [0, 1]
        connection.socket.close()
    eventually(lambda: logged)
    assert logged[0].startswith("refused ")
    assert logged[0].isprintable()
    assert len(logged) == 1  # at most a line a minute


def close_channels(members):
    """End clients that failed, which would otherwise report their state during later tests."""
    for client in members:
        client.channel.close()


def test_attacks_during_a_run_do_not_disturb_it(free_port, monkeypatch):
    monkeypatch.setattr("jaxdp.distributed.control_server.LATE_CONNECTION_SECONDS", 0.0)
    members = join_all(free_port)
    for text in ATTACKS.values():
        attack(free_port, text)
    assert on_all(members, lambda client: client.all_gather_object("still", client.rank)) == [[0, 1]] * 2
    assert on_all(members, lambda client: client.sync_point(None)) == [None] * 2
    assert [client.failures.failure for client in members] == [None] * 2
    assert members[0].refused_connections == len(ATTACKS)
    close_all(members)


def test_a_probe_of_the_port_does_not_count_as_refused(server, free_port):
    for _ in range(20):
        socket.create_connection(("127.0.0.1", free_port), 5).close()
    attack(free_port, b"{}\n")
    eventually(lambda: server.refused_connections == 1)


def test_a_flood_of_silent_connections_leaves_room_for_the_processes_of_the_run(free_port):
    server, opened, stopped = start_server(free_port, 3), [], threading.Event()

    def flood():
        while not stopped.is_set():
            try:
                opened.append(socket.create_connection(("127.0.0.1", free_port), 1))
            except OSError:
                time.sleep(0.01)
            if len(opened) > 300:
                opened.pop(0).close()

    flooding = [threading.Thread(target=flood) for _ in range(2)]
    for thread in flooding:
        thread.start()
    eventually(lambda: len(opened) > 200)
    most, joined = 0, []
    try:
        for rank in range(3):
            deadline = time.monotonic() + SECONDS
            while len(joined) == rank:
                assert time.monotonic() < deadline
                most = max(most, len(server.pending.addresses))
                with suppress(ConfigError, OSError):
                    joined.append(connect_by_hand(free_port, rank, 3))
    finally:
        stopped.set()
        for thread in flooding:
            thread.join()
        for connection in opened:
            connection.close()
    assert most <= max_pending()
    assert server.failure is None
    assert sorted(server.clients) == [0, 1, 2]
    assert server.refused_connections > 0
    for connection in joined:
        connection.socket.close()


def test_a_silent_connection_is_closed_after_the_handshake_timeout(free_port, server, monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", free_port), 5) as silent:
        silent.settimeout(SECONDS)
        while silent.recv(4096):
            pass
    eventually(lambda: server.refused_connections == 1)
    assert "it sent nothing for 0.3 s" in server.pending.last_refusal


def test_a_connection_that_sends_single_bytes_is_closed_after_the_handshake_timeout(free_port, server, monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", free_port), 5) as slow:
        while not server.refused_connections:
            slow.sendall(b"x")
            time.sleep(0.02)
        assert b"nonce" in slow.recv(4096)
        assert not server.pending.addresses


@pytest.mark.parametrize(
    ("rank", "processes", "reason"),
    [
        (1, 2, "another process on h already has rank 1"),
        (1, 4, "it was started as one of 4 processes, but rank 0 as one of 2"),
        (7, 2, "a run of 2 processes has no rank 7"),
    ],
)
def test_a_process_that_does_not_fit_into_the_run_is_refused_and_listed_at_the_start_timeout(
    free_port, rank, processes, reason
):
    server = start_server(free_port, start_seconds=2.0)
    first = connect_by_hand(free_port, 1)
    with pytest.raises(ConfigError) as error:
        connect_by_hand(free_port, rank, processes)
    assert (error.value.field, error.value.value) == ("rank", rank)
    assert reason in error.value.reason
    assert server.failure is None
    failure = receive_failure(first)
    assert failure.missing == [0]
    assert str(failure).startswith("1 of 2 processes did not connect within 2 s: rank 0 (connected: rank 1 on h); ")
    assert reason in str(failure)
    first.socket.close()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"broadcast": "rank 0's settled 1", "value": None}, "which only rank 0 may send"),
        ({"heartbeat": HEARTBEAT, "steps": [[1, float("nan"), 2.0]], "ping": 0.0}, "expected a finite number"),
        ({"heartbeat": HEARTBEAT, "steps": [], "ping": 10**400}, "ping: expected a finite number"),
        ({"heartbeat": HEARTBEAT, "steps": [[1, 2.0]], "ping": 0.0}, "expected a list of 3"),
        ({"heartbeat": HEARTBEAT | {"activity": 5}, "steps": [], "ping": 0.0}, "activity: expected text"),
        ({"heartbeat": HEARTBEAT | {"step": 1e400}, "steps": [], "ping": 0.0}, "step: expected a non-negative integer"),
        ({"heartbeat": HEARTBEAT, "steps": [], "ping": 0.0, "more": 1}, "expected an object with heartbeat, steps, ping"),
        ({"all_gather": "x" * 10**6, "value": 1, "main_thread": True}, "expected a name"),
        ({"all_gather": "apples\x1b[2J 1", "value": 1, "main_thread": True}, "expected a name"),
        ({"all_gather": "apples 1", "value": 1, "main_thread": "yes"}, "expected true or false"),
        ({"request": "format", "reason": ""}, "expected one of"),
        ({"paused_at": 5}, "unexpected message 'paused_at'"),
        ({"done": "stop"}, "unexpected message 'done'"),
        ({"failure": {}}, "unknown message"),
        ({}, "unknown message"),
    ],
)
def test_an_invalid_message_of_a_client_ends_the_run_with_the_reason(free_port, exits, message, reason):
    members = join_all(free_port)
    members[1].channel.send(message)
    eventually(lambda: len(exits) == 2)
    for failure in exits:
        assert (failure.rank, failure.code) == (1, 1)
        assert "sent an invalid message" in failure.reason
        assert reason in failure.reason
    assert members[0].server.thread.is_alive()
    close_channels(members)


def test_a_reported_failure_never_has_code_0_and_its_text_is_sanitized(free_port, exits):
    members = join_all(free_port)
    reason = "\x1b[2J\nrank 0 has done well " + "x" * 10_000
    location = LOCATION | {"activity": "\x1b[31mstep", "step": 3, "background_save": "\x07"}
    members[1].channel.send({"fail": reason, "code": 0, "location": location})
    eventually(lambda: len(exits) == 2)
    for failure in exits:
        assert failure.code == 1
        assert str(failure).isprintable()
        assert len(str(failure)) < 2500
    close_channels(members)


ATTACKED = """
import pathlib, sys
sys.path[:0] = [{root!r}]
from jaxdp.distributed import launchers
pathlib.Path({folder!r}, "port").write_text(str(launchers.detect().port))
from jaxdp.cli.main import run
run("train", sys.argv[1:], "train.py")
"""


@pytest.mark.slow
def test_a_run_attacked_from_start_to_end_succeeds_and_counts_the_attacks(tmp_path):
    root, script, run, port_file = Path(__file__).parents[2], tmp_path / "attacked.py", tmp_path / "run", tmp_path / "port"
    script.write_text(ATTACKED.format(root=str(root), folder=str(tmp_path)))
    command = [sys.executable, "-m", "jaxdp", "launch", "--processes", "2", "--restarts", "1", "--", str(script)]
    flags = ["--workdir", str(run), *TINY, "--mesh.cpu-devices", "2"]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command, *flags], cwd=root, stdout=pipe, stderr=pipe, text=True)
    ended, sent = threading.Event(), []

    def flood():
        while not (port_file.exists() and port_file.read_text()) and not ended.wait(0.05):
            pass
        for text in itertools.cycle([*ATTACKS.values(), b""]):
            if ended.wait(0.005):
                return
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(port_file.read_text())), 1) as connection:
                connection.sendall(text)
                sent.append(text)

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        _, err = process.communicate(timeout=600)
    finally:
        ended.set()
        flooding.join()
    assert process.returncode == 0, err
    assert "failed" not in err
    assert 100 < json.loads((run / "result.json").read_text())["refused_connections"] <= len(sent)
    logged = [line for line in err.splitlines() if "to port" in line]
    assert logged
    assert all(line.isprintable() for line in logged)
