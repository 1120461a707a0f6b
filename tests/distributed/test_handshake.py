import json
import socket
import threading

import pytest
from helpers.attacks import attack
from helpers.control import connect_by_hand, eventually, join, start_server

from jaxdp.distributed.handshake import LineBuffer, SignedChannel, unsigned_line
from jaxdp.errors import ConfigError

KEY = b"k" * 32


def channels():
    return (
        SignedChannel(KEY, b"t", local="client", remote="server"),
        SignedChannel(KEY, b"t", local="server", remote="client"),
    )


def test_open_of_a_line_that_was_altered_replayed_dropped_or_reflected_raises():
    client, server = channels()
    first, second = (client.seal({"beat": number}).rstrip(b"\n") for number in (1, 2))
    reflected = server.seal({"beat": 1}).rstrip(b"\n")
    for line in (second, first.replace(b"1}", b"3}"), b"", first[:64], reflected):
        with pytest.raises(ValueError, match="did not sign"):
            channels()[1].open(line)
    assert server.open(first) == {"beat": 1}
    with pytest.raises(ValueError, match="did not sign"):
        server.open(first)
    _, server = channels()
    assert [server.open(first), server.open(second)] == [{"beat": 1}, {"beat": 2}]


@pytest.mark.parametrize(("key", "transcript"), [(b"j" * 32, b"t"), (KEY, b"another connection")])
def test_open_of_a_line_of_another_key_or_connection_raises(key, transcript):
    line = channels()[0].seal({"beat": 1}).rstrip(b"\n")
    with pytest.raises(ValueError, match="did not sign"):
        SignedChannel(key, transcript, local="server", remote="client").open(line)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_feed_of_pieces_of_any_size_assembles_lines(size):
    text = b"one\n\ntwo and more\nthree\nrest"
    buffer, lines = LineBuffer(12), []
    for start in range(0, len(text), size):
        lines += buffer.feed(text[start : start + size])
    assert lines == [b"one", b"", b"two and more", b"three"]
    with pytest.raises(ValueError, match="a line of more than 12 bytes"):
        buffer.feed(b" and so much more")


def recorded_connection(port, rank):
    """A connection to rank 0, and everything that it sent in the handshake."""
    sent, sendall = [], socket.socket.sendall

    class RecordingSocket(socket.socket):
        def sendall(self, text):
            sent.append(text)
            return sendall(self, text)

    def create_connection(address, timeout):
        connection = RecordingSocket()
        connection.connect(address)
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", create_connection)
        return connect_by_hand(port, rank), sent


def test_a_replayed_handshake_is_refused(free_port):
    server = start_server(free_port)
    connection, sent = recorded_connection(free_port, 1)
    assert len(sent) == 2
    eventually(lambda: 1 in server.clients)
    connection.socket.close()
    eventually(lambda: server.clients[1].gone)
    server.clients.clear()  # rank 1 is free again
    attack(free_port, b"".join(sent))
    eventually(lambda: server.refused_connections == 1)
    assert "does not have this run's secret" in server.pending.last_refusal
    assert not server.clients


def test_a_false_rank_0_without_the_secret_is_refused_and_learns_only_rank_and_processes(free_port, capsys, monkeypatch):
    """It listens at the coordinator's port and speaks the protocol."""
    monkeypatch.setattr("jaxdp.distributed.connection.WARN_SECONDS", 0.0)
    received = []
    with socket.create_server(("127.0.0.1", free_port)) as false_rank_0:

        def serve():
            while True:
                try:
                    connection, _ = false_rank_0.accept()
                except OSError:
                    return
                with connection, connection.makefile("rb") as lines:
                    connection.sendall(unsigned_line({"jaxdp": 1, "nonce": "0" * 32, "secret": "environment"}))
                    received.append(lines.readline())
                    # Reflects the client's own proof.
                    connection.sendall(unsigned_line({"proof": json.loads(received[-1])["proof"]}))
                    received.append(lines.readline())

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ConfigError) as error:
            join(free_port, 1, start_seconds=1.0)
        false_rank_0.shutdown(socket.SHUT_RDWR)
    assert "it does not have this run's secret" in error.value.reason
    assert "JAXDP_SECRET" in error.value.hint
    assert {tuple(json.loads(line)) for line in received if line} == {("rank", "processes", "nonce", "proof")}
    assert "rank 1 on" in capsys.readouterr().err  # a warning before the timeout


def test_a_process_with_another_secret_is_refused_with_the_fix(free_port):
    server = start_server(free_port)
    with pytest.raises(ConfigError) as error:
        connect_by_hand(free_port, 1, value="another secret than rank 0's")
    assert error.value.hint.startswith("JAXDP_SECRET differs between rank 0 and ")
    assert "openssl rand -hex 32" in error.value.hint
    assert server.failure is None
    assert server.refused_connections > 0
