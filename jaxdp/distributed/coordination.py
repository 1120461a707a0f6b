"""Start of JAX's coordination service, which connects the processes of a run for its collectives."""

import contextlib
import errno
import ipaddress
import os
import socket

from jaxdp.distributed.launchers import Cluster
from jaxdp.errors import ConfigError, first_line

SHUTDOWN_SECONDS = 10
HEARTBEAT_SECONDS = 3600  # the status files name a silent process long before; JAX's 100 s end runs that are suspended
START_SECONDS = 300  # for the processes, which have all started, to connect


def initialize(cluster: Cluster, *, local_device_ids: list[int] | None = None) -> None:
    """Connect this process with the others of its run, by `jax.distributed.initialize`. Blocks until all have called it.

    local_device_ids: the GPUs of this process; None for all. Raises ConfigError if the coordinator's port is taken, on which
    JAX would crash, and ConnectionError if JAX does not start.
    """
    import jax

    bind = bind_address(cluster.address, cluster.port) if cluster.rank == 0 else None
    with contextlib.suppress(AttributeError):  # a release may lack this option: its handler would replace that of the run
        jax.config.update("jax_enable_preemption_service", False)
    address = format_address(cluster.address, cluster.port)
    try:
        jax.distributed.initialize(
            address,
            cluster.num_processes,
            cluster.rank,
            local_device_ids=local_device_ids,
            coordinator_bind_address=bind,
            cluster_detection_method="deactivate",  # which under Slurm and Open MPI would leave this process one GPU
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


def bind_address(host: str, port: int) -> str:
    """HOST:PORT at which rank 0 listens: the coordinator's address, or all interfaces if that is not an address of this host.

    Raises ConfigError if the port is taken, OSError if this process may not listen.
    """
    every = format_address("::" if socket.has_dualstack_ipv6() else "0.0.0.0", port)
    try:
        (family, _, _, _, target), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # a name that other hosts resolve
        return every
    number = str(target[0])
    if is_loopback(number) and not is_loopback(host):  # as in Debian's /etc/hosts: the others could not reach it
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
