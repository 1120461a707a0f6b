"""Control channels within one process: clients are threads, and connections can be made by hand."""

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jaxdp.distributed.connection import Connection, connect
from jaxdp.distributed.control_client import ControlClient
from jaxdp.distributed.control_server import ControlServer
from jaxdp.distributed.failure import Failure
from jaxdp.distributed.launchers import Cluster
from jaxdp.distributed.secret import Secret

SECONDS = 60.0
SECRET = "the secret of these tests"
HOST = socket.gethostname()


def cluster_of(port, rank, processes=2):
    return Cluster("test", "127.0.0.1", port, rank, processes)


def secret_of(port, rank=0, processes=2, value=SECRET):
    return Secret(cluster_of(port, rank, processes), environment={"JAXDP_SECRET": value})


def join(port, rank, processes=2, *, start_seconds=SECONDS, **options) -> ControlClient:
    options.setdefault("secret", secret_of(port, rank, processes))
    return ControlClient.connect(
        cluster_of(port, rank, processes), start_seconds=start_seconds, silence_seconds=SECONDS, gpus=[], **options
    )


def join_all(port, processes=2) -> list[ControlClient]:
    with ThreadPoolExecutor(processes) as threads:
        return list(threads.map(lambda rank: join(port, rank, processes), range(processes)))


def on_all(clients, function) -> list:
    """The results of a function that every client calls in a thread of its own."""
    with ThreadPoolExecutor(max(1, len(clients))) as threads:
        return list(threads.map(function, clients))


def close_all(clients) -> None:
    on_all(clients, lambda client: client.close())


def start_server(port, processes=2, *, start_seconds=100 * SECONDS, secret=None, info=lambda text: None) -> ControlServer:
    """Rank 0's server without a client on rank 0."""
    return ControlServer.start(
        "127.0.0.1",
        port,
        processes,
        start_seconds=start_seconds,
        silence_seconds=100 * SECONDS,
        secret=secret or secret_of(port),
        info=info,
    )


def connect_by_hand(port, rank, processes=2, *, value=SECRET, timeout_seconds=0.5) -> Connection:
    """A connection to rank 0, of a process that has a secret."""
    secret = secret_of(port, rank, processes, value)
    return connect(
        cluster_of(port, rank, processes),
        ("127.0.0.1", port),
        secret=secret,
        read_key=secret.read,
        host="h",
        member={"host": "h", "identity": "e", "gpus": [], "jax_port": None},
        timeout_seconds=timeout_seconds,
        while_waiting=lambda: None,
    )


def receive(connection: Connection, kind: str) -> dict:
    """The next message of a kind that rank 0 sends."""
    lines = list(connection.received)
    connection.received.clear()
    connection.socket.settimeout(SECONDS)
    while True:
        for line in lines:
            if kind in (message := connection.channel.open(line)):
                return message
        lines = connection.lines.feed(connection.socket.recv(4096))


def receive_failure(connection: Connection) -> Failure:
    return Failure.from_message(receive(connection, "failure")["failure"])


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
