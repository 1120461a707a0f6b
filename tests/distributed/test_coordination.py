"""Start of JAX's coordination service: where rank 0 listens, and when other ranks connect."""

import errno
import os
import socket
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import pytest

from jaxdp.distributed import coordination, status
from jaxdp.distributed.launchers import Cluster
from jaxdp.errors import ConfigError


@pytest.mark.parametrize("rank", [0, 2])
def test_others_connect_once_rank_0_listens(monkeypatch, rank):
    """And by JAX's arguments in the units and the order that it expects."""
    events, given, waits = [], [], []

    def happens(event):
        events.append(event)
        waits.append(status.current().waits.get(""))

    def initialize(*arguments, **options):
        happens("connects")
        given.append((arguments, options))

    def in_thread(function, *arguments):
        function(*arguments)
        return SimpleNamespace(result=lambda: happens("has connected"), done=lambda: False)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", lambda *setting: events.append(setting))
    monkeypatch.setattr(coordination, "in_daemon_thread", in_thread)
    monkeypatch.setattr(coordination, "bind_address", lambda host, port: f"bound {host} {port}")
    monkeypatch.setattr(coordination, "is_listening", lambda port: events.append(f"listens at {port}") or True)
    monkeypatch.setenv("no_grpc_proxy", "a")
    group = SimpleNamespace(cluster=Cluster("jax", "::1", 7, rank, 3), is_rank0=rank == 0)
    group.all_gather_object = lambda name, value: events.append(name)
    coordination.initialize(group, local_device_ids=[4])
    assert events[:2] == [("jax_enable_preemption_service", False), ("jax_check_proxy_envs", False)]
    of_rank_0 = ["connects", "listens at 7", "rank 0 to listen", "has connected"]
    assert events[2:] == (of_rank_0 if rank == 0 else ["rank 0 to listen", "connects"])
    assert waits[-1] == status.OTHER_RANKS
    assert os.environ[coordination.NO_PROXY[0]] == "a,::1"
    assert given == [
        (
            ("[::1]:7", 3, rank),
            {
                "local_device_ids": [4],
                "coordinator_bind_address": "bound ::1 7" if rank == 0 else None,
                "cluster_detection_method": "deactivate",
                "initialization_timeout": 300,
                "heartbeat_timeout_seconds": 3600,
                "shutdown_timeout_seconds": 10,
            },
        )
    ]


def test_an_error_of_jax_is_a_connection_error_with_the_address(monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("no")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    with pytest.raises(ConnectionError, match=r"does not start at a:7 \(no\)") as error:
        coordination._connect(Cluster("jax", "a", 7, 1, 2), None, None)
    assert error.value.errno == errno.ECONNABORTED


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "node0"),
        ({"no_proxy": "a,b"}, "a,b,node0"),
        ({"no_proxy": "a", "no_grpc_proxy": "c"}, "c,node0"),
        ({"no_proxy": "a,node0"}, None),
        ({"no_proxy": "node01"}, "node01,node0"),
    ],
)
def test_the_host_of_rank_0_is_excluded_from_proxies_once(monkeypatch, before, after):
    for name in coordination.NO_PROXY:
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        coordination.exclude_from_proxies("node0")
        assert os.environ.get(coordination.NO_PROXY[0]) == after
    assert os.environ.get(coordination.NO_PROXY[1]) == before.get("no_proxy")


def test_is_listening_is_true_for_a_port_of_this_process_only(free_port):
    assert not coordination.is_listening(free_port)
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))[: 1 + socket.has_dualstack_ipv6()]:
        with socket.create_server((host, free_port), family=family):
            assert coordination.is_listening(free_port)
            assert not coordination.is_listening(free_port + 1)
            with socket.create_connection((host, free_port)) as connection:
                assert not coordination.is_listening(connection.getsockname()[1])


def test_the_wait_for_the_service_ends_when_it_listens_or_fails_or_after_ten_seconds(monkeypatch):
    clock, listens = [0.0], {1.0: True}
    monkeypatch.setattr(coordination, "is_listening", lambda port: clock[0] >= min(listens, default=1e9))
    sleep = lambda seconds: clock.__setitem__(0, clock[0] + seconds)  # noqa: E731
    monkeypatch.setattr(coordination, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    for seconds in (1.0, 10.0):
        clock[0] = 0.0
        coordination._wait_until_listening(Future(), 7)
        assert clock[0] == pytest.approx(seconds, abs=0.02)
        listens.clear()
    failed = Future()
    failed.set_exception(KeyError("no"))
    with pytest.raises(KeyError):
        coordination._wait_until_listening(failed, 7)


def resolves_to(address):
    return lambda host, port, **_: [(socket.AF_INET, None, None, None, (address, port))]


def test_rank_0_listens_at_the_address_of_the_coordinator_if_it_is_one_of_this_host_else_at_all(monkeypatch, free_port):
    every = f"[::]:{free_port}" if socket.has_dualstack_ipv6() else f"0.0.0.0:{free_port}"
    for host in ("127.0.0.1", "localhost"):
        assert coordination.bind_address(host, free_port) in (f"127.0.0.1:{free_port}", f"[::1]:{free_port}")
    for address in (
        "127.0.1.1",
        "203.0.113.1",
    ):  # as in Debian's /etc/hosts; of another host
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", resolves_to(address))
            assert coordination.bind_address("node0", free_port) == every
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: open("/dev/null/none"))
        assert coordination.bind_address("node0", free_port) == every
        patch.setattr(socket, "has_dualstack_ipv6", lambda: False)
        assert coordination.bind_address("node0", free_port) == f"0.0.0.0:{free_port}"
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(ConfigError, match="coordinator port"):
        coordination.bind_address("127.0.0.1", free_port)

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(socket, "create_server", refused)
    with pytest.raises(OSError, match=f"port {free_port}: rank 0 cannot listen on 127.0.0.1"):
        coordination.bind_address("127.0.0.1", free_port)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("localhost", True), ("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("fe80::1%eth0", False), ("node0", False)],
)
def test_a_loopback_address_is_a_name_or_a_number(address, expected):
    assert coordination.is_loopback(address) == expected
