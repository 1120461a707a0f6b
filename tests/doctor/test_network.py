"""Checks of host name, interfaces and launcher variables."""

import os
import socket
from functools import partial

import pytest
from helpers.doctor import run_check

from jaxdp.distributed import launchers
from jaxdp.doctor import network


def by_flags(coordinator, rank=1):
    return partial(launchers.detect, coordinator=coordinator, processes=2, rank=rank)


@pytest.fixture
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(network.LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)


def test_check_launcher_with_a_used_port_warns_or_reports_an_error_on_rank_0(monkeypatch, no_launcher):
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = used.getsockname()[1]
        monkeypatch.setattr(network.launchers, "DEFAULT_PORT", port)
        result = run_check(network.check_launcher)
        assert (result.status, f"single process; port {port} is in use" in result.message) == ("warning", True)
        for name, value in {"COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "NUM_PROCESSES": "2", "PROCESS_ID": "0"}.items():
            monkeypatch.setenv(f"JAX_{name}", value)
        result = run_check(network.check_launcher)
        assert (result.status, result.message.split("; ")[0]) == ("error", f"jax: rank 0 of 2, rank 0 at 127.0.0.1:{port}")
    assert run_check(network.check_launcher).status == "ok"


def test_check_launcher_with_an_incomplete_environment_reports_the_missing_variable(monkeypatch, no_launcher):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    result = run_check(network.check_launcher)
    assert (result.status, "JAX_COORDINATOR_ADDRESS" in result.message) == ("error", True)
    assert "HOST:PORT" in result.message + result.fix


def test_check_launcher_on_other_ranks_connects_to_rank_0():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        result = run_check(network.check_launcher, by_flags(address))
        assert (result.status, f"{address} refuses connections" in result.message) == ("warning", True)
        listener.listen()
        result = run_check(network.check_launcher, by_flags(address))
        assert (result.status, f"{address} answers" in result.message) == ("ok", True)


def test_check_launcher_with_a_silent_rank_0_warns_of_a_firewall(monkeypatch):
    def time_out(address, seconds):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", time_out)
    result = run_check(network.check_launcher, by_flags("10.255.255.1:1234"))
    assert result.status == "warning"
    assert "10.255.255.1:1234: no answer in 3 s; its host is down or a firewall blocks the port" in result.message


def test_check_host_with_a_loopback_name_warns_if_the_run_has_other_hosts(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.0.1", 0))])
    assert run_check(network.check_host, partial(launchers.detect, "none")).status == "ok"
    assert run_check(network.check_host, by_flags("127.0.0.1:1234", 0)).status == "ok"
    assert run_check(network.check_host, by_flags("node0:1234", 0)).status == "warning"


def test_check_host_with_an_unresolvable_name_warns(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert run_check(network.check_host).status == "warning"
