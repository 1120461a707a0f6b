import contextlib
import socket
import threading
import time

import pytest
from helpers.control import (
    HOST,
    SECONDS,
    close_all,
    cluster_of,
    connect_by_hand,
    eventually,
    join,
    on_all,
    receive_failure,
    secret_of,
    start_server,
)

from jaxdp.distributed.control_client import ControlClient
from jaxdp.distributed.failure import FailureHandler
from jaxdp.distributed.launchers import Cluster
from jaxdp.distributed.secret import Secret
from jaxdp.errors import ConfigError


@pytest.fixture
def exits(monkeypatch):
    """The failures for which clients exit, which is recorded instead. Every thread counts as the main thread."""
    failures = []
    monkeypatch.setattr(FailureHandler, "exit", lambda handler: failures.append(handler.failure))
    monkeypatch.setattr("jaxdp.distributed.control_channel.threading.main_thread", threading.current_thread)
    return failures


def test_connect_with_four_processes_gives_each_the_hosts_and_its_local_rank(clients):
    for rank, client in enumerate(clients(4)):
        assert (client.rank, client.num_processes, client.is_rank0) == (rank, 4, rank == 0)
        assert client.hosts == [HOST] * 4
        assert (client.local_rank, len(client.local_members), client.host_numbers) == (rank, 4, [0] * 4)


@pytest.mark.parametrize("kind", ["all_gather_object", "broadcast_object"])
def test_processes_waiting_for_different_operations_fail_and_name_both(exits, clients, kind):
    members = clients(2)
    threading.Thread(target=members[0].all_gather_object, args=("apples", 1), daemon=True).start()
    threading.Thread(target=getattr(members[1], kind), args=("pears", 1), daemon=True).start()
    eventually(lambda: len(exits) == 2)
    operation = "pears" if kind == "all_gather_object" else "rank 0's pears"
    assert exits[0].rank == 1
    assert f"waits for {operation!r} while rank 0 waits for 'apples'" in exits[0].reason
    for client in members:
        client.failures.set_exiting()


def test_a_waiting_process_stops_with_a_process_that_was_asked_to_at_the_same_position(clients, monkeypatch):
    """Rank 0 waits in an all-gather; rank 1 stops in an earlier activity, which would else count as behind in a later hang."""
    monkeypatch.setattr("jaxdp.distributed.control_channel.threading.main_thread", threading.current_thread)
    members, stopped = clients(2), []

    def check(client):
        if client.check_stop("SIGTERM" if client.rank == 1 else None):
            raise InterruptedError

    def run(client):
        client.attach(before_exit=lambda: None, while_waiting=lambda: check(client))
        client.status.watch_thread(threading.get_ident())
        client.set_activity("compile")
        try:
            if client.rank == 0:
                client.set_activity("evaluate")
                client.all_gather_object("a value that rank 1 never gives", None)
            while True:
                time.sleep(0.05)
                check(client)
        except InterruptedError:
            stopped.append(client.rank)

    on_all(members, run)
    assert sorted(stopped) == [0, 1]


def test_an_operation_that_a_stop_cut_off_on_one_process_is_not_completed_by_the_next_run(clients, monkeypatch):
    """Rank 0 waits in a barrier when the processes agree to stop; rank 1 stops before it. Both then begin another run."""
    monkeypatch.setattr("jaxdp.distributed.control_channel.threading.main_thread", threading.current_thread)
    members = clients(2)

    def check(client):
        if client.check_stop("SIGTERM" if client.rank == 1 else None):
            raise InterruptedError

    def run(client):
        client.attach(before_exit=lambda: None, while_waiting=lambda: check(client))
        client.status.watch_thread(threading.get_ident())
        with contextlib.suppress(InterruptedError):
            if client.rank == 0:
                client.all_gather_object("ready", "first run")
            while True:
                time.sleep(0.05)
                check(client)
        client.attach(before_exit=lambda: None, while_waiting=lambda: None)
        return client.all_gather_object("ready", "second run")

    assert on_all(members, run) == [["second run"] * 2] * 2
    assert [client.status.position for client in members] == [(1, 1, 0)] * 2


def test_a_process_stopped_before_all_have_joined_stops_the_others(free_port):
    start_server(free_port, 3, secret=secret_of(free_port, processes=3))

    def check():
        if time.monotonic() > joined + 1:
            raise InterruptedError("SIGTERM")

    other, joined = connect_by_hand(free_port, 2, 3, timeout_seconds=SECONDS), time.monotonic()
    with other.socket:
        with pytest.raises(InterruptedError):
            join(free_port, 1, 3, while_waiting=check)
        failure = receive_failure(other)
    assert failure.code == 75
    assert str(failure) == f"rank 1 on {HOST} was stopped during start-up: SIGTERM"


def test_connect_to_a_server_of_another_protocol_raises(free_port):
    with socket.create_server(("127.0.0.1", free_port)) as other:

        def answer():
            while True:
                try:
                    connection, _ = other.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConfigError) as error:
            join(free_port, 1, start_seconds=0.5)
        other.shutdown(socket.SHUT_RDWR)
    assert (error.value.field, error.value.value) == ("coordinator address", f"127.0.0.1:{free_port}")
    assert "does not speak jaxdp's protocol" in error.value.reason


def test_connect_on_rank_0_with_a_port_in_use_raises(free_port):
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(ConfigError) as error:
        join(free_port, 0)
    assert (error.value.field, error.value.value) == ("coordinator port", free_port)
    assert "cannot listen" in error.value.reason
    assert "choose another port" in error.value.hint


def test_connect_without_rank_0_times_out(free_port, monkeypatch):
    monkeypatch.setattr("jaxdp.distributed.connection.CONNECT_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=r"rank 1 on .*: rank 0 did not answer at 127\.0\.0\.1"):
        join(free_port, 1, start_seconds=0.3)


def test_connect_on_rank_0_that_cannot_write_the_secret_raises_and_frees_the_port(tmp_path, free_port):
    (tmp_path / "file").write_text("")
    secret = Secret(cluster_of(free_port, 0), tmp_path / "file" / "run", {})
    with pytest.raises(ConfigError) as error:
        join(free_port, 0, start_seconds=1.0, secret=secret)
    assert error.value.field == "--workdir"
    assert "rank 0 cannot write the run's secret there" in error.value.reason
    assert "JAXDP_SECRET" in error.value.hint
    socket.create_server(("127.0.0.1", free_port)).close()


def test_connect_replaces_a_secret_file_of_an_earlier_run(tmp_path, free_port):
    """The other ranks start first, and read that file before rank 0 has written its own."""
    (tmp_path / f".secret-{free_port}").write_text("0" * 64)
    (tmp_path / "config.json").write_text("{}")

    def start(rank):
        time.sleep(0.5 * (rank == 0))
        return join(free_port, rank, 3, secret=Secret(cluster_of(free_port, rank, 3), tmp_path, {}))

    members = on_all(range(3), start)
    assert on_all(members, lambda client: client.all_gather_object("a", client.rank)) == [[0, 1, 2]] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    close_all(members)


def test_connect_without_access_to_the_secret_names_the_fix_at_the_timeout(tmp_path, free_port):
    server = start_server(free_port, secret=Secret(cluster_of(free_port, 0), tmp_path / "server", {}))
    elsewhere = Secret(cluster_of(free_port, 1), tmp_path / "client", {})
    with pytest.raises(ConfigError) as error:
        join(free_port, 1, start_seconds=0.5, secret=elsewhere)
    assert "client/.secret" in error.value.reason
    assert "--workdir that all hosts share" in error.value.hint
    with pytest.raises(ConfigError) as error:
        join(free_port, 1, start_seconds=0.5)
    assert "this process has JAXDP_SECRET and rank 0 does not" in error.value.hint
    assert server.failure is None
    server.secret.remove()


def test_connect_of_a_second_run_at_the_port_keeps_the_secret_of_the_first(tmp_path, free_port):
    first = start_server(free_port, secret=Secret(cluster_of(free_port, 0), tmp_path, {}))
    with pytest.raises(ConfigError, match=r"rank 0 cannot listen"):
        join(free_port, 0, start_seconds=1.0, secret=Secret(cluster_of(free_port, 0), tmp_path, {}))
    assert Secret(cluster_of(free_port, 1), tmp_path, {}).read() == first.key
    first.secret.remove()


def test_connect_sanitizes_the_coordinator_address_in_warnings(free_port, capsys):
    cluster = Cluster("test", "\x1b[2Jnode", free_port, 0, 2)

    def check():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ControlClient.connect(
            cluster, start_seconds=SECONDS, silence_seconds=SECONDS, gpus=[], while_waiting=check, secret=secret_of(free_port)
        )
    assert capsys.readouterr().err.startswith(r"jaxdp: \x1b[2Jnode does not resolve on this host")


def test_rank_0_waits_at_exit_for_the_processes_that_are_still_connected(exits, clients):
    first, other = clients(2)
    began = time.monotonic()
    threading.Timer(0.5, other.channel.connection.socket.shutdown, [socket.SHUT_RDWR]).start()
    first._wait_for_others()
    assert 0.4 < time.monotonic() - began < 4
    assert first.server.only_silent_left
    first.failures.set_exiting()
    other.failures.set_exiting()
