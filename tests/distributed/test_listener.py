import socket
from dataclasses import replace

import pytest
from helpers.control import cluster_of, secret_of

from jaxdp.distributed import listener
from jaxdp.distributed.connection import connect


def bound_addresses(result):
    sockets, warning = result
    addresses = sorted(listening.getsockname()[0] for listening in sockets)
    for listening in sockets:
        listening.close()
    return addresses, warning


def test_listen_at_a_local_address_binds_that_address_only(free_port):
    assert bound_addresses(listener.listen("127.0.0.1", free_port)) == (["127.0.0.1"], "")
    addresses, warning = bound_addresses(listener.listen("localhost", free_port))
    assert (set(addresses) <= {"127.0.0.1", "::1"}, warning) == (True, "")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_listen_at_an_ipv6_address_binds_it(free_port):
    assert bound_addresses(listener.listen("::1", free_port)) == (["::1"], "")


@pytest.mark.parametrize(
    ("resolved", "reason"),
    [
        ([(socket.AF_INET, ("192.0.2.7", 0))], "is not an address of this host"),
        ([(socket.AF_INET, ("127.0.1.1", 0))], "resolves to the loopback on this host"),
        (OSError(8, "Name or service not known"), "does not resolve on this host"),
    ],
)
def test_listen_at_an_address_that_is_not_local_binds_all_interfaces_and_warns(free_port, monkeypatch, resolved, reason):
    def getaddrinfo(host, port, **options):
        if isinstance(resolved, OSError):
            raise resolved
        return [(family, socket.SOCK_STREAM, 6, "", (address[0], port)) for family, address in resolved]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    addresses, warning = bound_addresses(listener.listen("rank0.example", free_port))
    assert addresses in (["::"], ["0.0.0.0"])
    assert reason in warning
    assert "on all interfaces" in warning


def test_listen_at_a_name_of_several_addresses_binds_the_local_ones(free_port, monkeypatch):
    addresses = [("127.0.0.1", free_port), ("192.0.2.7", free_port)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **b: [(socket.AF_INET, 1, 6, "", address) for address in addresses])
    monkeypatch.setattr(listener, "is_loopback", lambda address: False)
    assert bound_addresses(listener.listen("rank0.example", free_port)) == (["127.0.0.1"], "")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *[(address, True) for address in ("localhost", "127.0.0.1", "127.9.9.9", "::1")],
        *[(address, False) for address in ("10.0.0.1", "node0", "fe80::1%eth0", "127.example.org")],
    ],
)
def test_is_loopback_of_addresses_that_mean_the_local_host_everywhere_is_true(address, expected):
    assert listener.is_loopback(address) == expected


def test_connect_timeout_shows_a_sanitized_address(free_port):
    cluster = replace(cluster_of(free_port, 1), address="\x1b[2Jnode")
    with pytest.raises(TimeoutError, match=r"rank 0 did not answer at \\x1b\[2Jnode:"):
        connect(
            cluster,
            (cluster.address, 1),
            secret=secret_of(free_port, 1),
            read_key=bytes,
            host="h",
            member={},
            timeout_seconds=0.1,
            while_waiting=lambda: None,
        )
