"""Start of JAX's coordination service, which connects the processes of a run for its collectives."""

import contextlib
import errno
import ipaddress
import os
import socket
import time
from concurrent.futures import Future

from jaxdp.distributed import status
from jaxdp.distributed.launchers import Cluster
from jaxdp.distributed.process_group import JoinedProcesses
from jaxdp.distributed.signal_handler import in_daemon_thread
from jaxdp.errors import ConfigError, first_line

SHUTDOWN_SECONDS = 10
HEARTBEAT_SECONDS = 3600  # the status files name a silent process much earlier; JAX's 100 s would end suspended runs
START_SECONDS = 300  # for the processes, which have all started, to connect
LISTEN_SECONDS = 10.0  # for rank 0 to see its own service, where the system shows it
POLL_SECONDS = 0.01
NO_PROXY = ("no_grpc_proxy", "no_proxy")  # gRPC reads the second if the first is not set
LISTENS = "0A"  # the state of a socket in /proc/self/net/tcp
OPTIONS = {  # of JAX; a release may lack one
    "jax_enable_preemption_service": False,  # its SIGTERM handler would replace the run's
    "jax_check_proxy_envs": False,  # warns of proxies, which jaxdp does not use
}


def initialize(group: JoinedProcesses, *, local_device_ids: list[int] | None = None) -> None:
    """Connect the processes of this run by `jax.distributed.initialize`. Blocks until all of them have called this function.

    Other ranks connect only once rank 0 listens. Otherwise they might reach a different run at the same port, and end it.
    local_device_ids: the GPUs of this process; None for all. Raises ConfigError if the coordinator's port is taken (JAX would
    crash), and ConnectionError if JAX does not start.
    """
    import jax

    cluster = group.cluster
    bind = bind_address(cluster.address, cluster.port) if group.is_rank0 else None
    for option, value in OPTIONS.items():
        with contextlib.suppress(AttributeError):
            jax.config.update(option, value)
    exclude_from_proxies(cluster.address)
    service = in_daemon_thread(_connect, cluster, bind, local_device_ids) if group.is_rank0 else None
    if service is not None:
        _wait_until_listening(service, cluster.port)
    group.all_gather_object("rank 0 to listen", None)
    with status.current().waiting(status.OTHER_RANKS):
        _connect(cluster, bind, local_device_ids) if service is None else service.result()


def _connect(cluster: Cluster, bind: str | None, local_device_ids: list[int] | None) -> None:
    import jax

    address = format_address(cluster.address, cluster.port)
    try:
        jax.distributed.initialize(
            address,
            cluster.num_processes,
            cluster.rank,
            local_device_ids=local_device_ids,
            coordinator_bind_address=bind,
            cluster_detection_method="deactivate",  # detection would leave this process one GPU under Slurm and Open MPI
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except Exception as error:
        raise ConnectionError(
            errno.ECONNABORTED,
            f"jax.distributed does not start at {address} ({first_line(error)}); check that the hosts reach each "
            "other at all ports, and that no JAX computation ran before",
        ) from None


def exclude_from_proxies(host: str) -> None:
    """Let JAX's gRPC connect to a host directly: a company's `http_proxy` leads out of its network."""
    name, general = NO_PROXY
    excluded = os.environ.get(name, os.environ.get(general, ""))
    if host not in excluded.split(","):
        os.environ[name] = f"{excluded},{host}".lstrip(",")


def _wait_until_listening(service: "Future[None]", port: int) -> None:
    """Wait until the service listens. Raises the service's error if it ends first."""
    deadline = time.monotonic() + LISTEN_SECONDS
    while not (service.done() or is_listening(port)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if service.done():
        service.result()


def is_listening(port: int) -> bool:
    """Whether this process, and no other, listens at a TCP port; False where the system does not show it."""
    own, sockets = set[str](), list[list[str]]()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}") as file:
            sockets += [line.split() for line in file]
    listening = {f"socket:[{each[9]}]" for each in sockets if each[3] == LISTENS and int(each[1].split(":")[1], 16) == port}
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return bool(own & listening)


def bind_address(host: str, port: int) -> str:
    """HOST:PORT where rank 0 listens: the coordinator's address, or all interfaces if this host does not have that address.

    Raises ConfigError if the port is taken, OSError if this process may not listen.
    """
    every = format_address("::" if socket.has_dualstack_ipv6() else "0.0.0.0", port)
    try:
        (family, _, _, _, target), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # a name that other hosts resolve
        return every
    number = str(target[0])
    if is_loopback(number) and not is_loopback(host):  # as in Debian's /etc/hosts: other hosts could not reach it
        return every
    try:
        with socket.create_server(target, family=family):
            return format_address(number, port)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # a Kubernetes service, NAT
            return every
        reason = f"rank 0 cannot listen on {host} ({os.strerror(error.errno or 0)})"
        if error.errno != errno.EADDRINUSE:
            raise OSError(error.errno, f"port {port}: {reason}") from None
        raise ConfigError("coordinator port", port, reason=reason, hint="another run may use it; choose another port") from None


def is_loopback(address: str) -> bool:
    """Whether an address, a name or a number, means the local host on every host."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def format_address(address: str, port: int) -> str:
    """HOST:PORT or [IPv6]:PORT."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
