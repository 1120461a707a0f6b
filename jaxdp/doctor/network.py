"""Checks of host name, network interfaces and the variables of a launcher."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

from jaxdp.distributed import coordination, launchers
from jaxdp.doctor.check_result import Problem, ResultBuilder
from jaxdp.errors import ConfigError

LAUNCHER_PREFIXES: tuple[str, ...] = (
    "JAX_COORDINATOR",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS",
    "COORDINATOR_",
    "NUM_PROCESSES",
    "PROCESS_ID",
)
LAUNCHER_PREFIXES += ("MASTER_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_", "SLURM_")
Detect = Callable[[], launchers.Cluster | None]
CONNECT_SECONDS = 3.0
MOST_VARIABLES = 8  # in the message; Slurm sets dozens


def check_host(result: ResultBuilder, detect: Detect = launchers.detect) -> None:
    """The host name resolves, for runs on several hosts to an address other than the loopback.

    detect: returns the processes of the run.
    """
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        message = f"host name {name!r} does not resolve ({error.strerror})"
        result.warning(message, "add it to /etc/hosts or the DNS (needed for runs on several hosts)")
        return
    message = f"{name} resolves to {', '.join(addresses)}"
    if not all(map(coordination.is_loopback, addresses)):
        result.ok(message)
    elif _has_other_hosts(detect):
        result.warning(f"{message}, the loopback only", "make the name resolve to a network address in /etc/hosts or the DNS")
    else:
        result.ok(f"{message}, the loopback only")


def _has_other_hosts(detect: Detect) -> bool:
    """Whether rank 0 of the run may be on another host."""
    try:
        cluster = detect()
    except ConfigError:  # `check_launcher` reports it
        return False
    return cluster is not None and cluster.num_processes > 1 and not coordination.is_loopback(cluster.address)


def check_interfaces(result: ResultBuilder) -> None:
    """List the network interfaces that are up, with the speed that the driver reports."""
    interfaces = []
    for _, name in socket.if_nameindex():
        if name != "lo" and _interface_attribute(name, "operstate") in ("up", "unknown"):
            speed = _interface_attribute(name, "speed")
            interfaces.append(name + (f" {int(speed) / 1000:g} Gbit/s" if speed.isdigit() else ""))
    result.ok(", ".join(interfaces) or "only the loopback")
    folder = Path("/sys/class/infiniband")
    if folder.is_dir() and (adapters := sorted(path.name for path in folder.iterdir())):
        result.ok(f"InfiniBand or RoCE: {', '.join(adapters)}")


def _interface_attribute(interface: str, attribute: str) -> str:
    try:
        return Path("/sys/class/net", interface, attribute).read_text().strip()
    except OSError:  # the driver does not report it
        return ""


def check_launcher(result: ResultBuilder, detect: Detect = launchers.detect) -> None:
    """The launcher's variables make sense, and rank 0's port is free (on rank 0) or answers (elsewhere).

    detect: returns the processes of the run.
    """
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(LAUNCHER_PREFIXES)}
    try:
        cluster = detect()
    except ConfigError as error:
        fix = "correct the launcher's variables, or give --cluster none to train with one process"
        Problem.from_error(error).report(result, default_fix=fix)
        return
    if cluster is None:
        result.ok("single process")
        if warning := launchers.unused_tasks_warning():
            result.warning(warning, "start the run with srun, or give --cluster none")
    else:
        rank_0 = f"{cluster.address}:{cluster.port}"
        result.ok(f"{cluster.launcher}: rank {cluster.rank} of {cluster.num_processes}, rank 0 at {rank_0}")
        try:
            socket.getaddrinfo(cluster.address, cluster.port)
        except OSError as error:
            message = f"{cluster.address} does not resolve ({error.strerror})"
            result.error(message, "add it to /etc/hosts or the DNS, or give rank 0's address")
            return
    if variables:
        more = f" and {len(variables) - MOST_VARIABLES} more" if len(variables) > MOST_VARIABLES else ""
        result.ok(", ".join(f"{name}={value}" for name, value in list(variables.items())[:MOST_VARIABLES]) + more)
    if cluster is None:
        _check_port(result, "0.0.0.0", port=launchers.DEFAULT_PORT, required=False)
    elif cluster.rank == 0:
        _check_port(result, cluster.address, port=cluster.port, required=True)
    else:
        _check_rank_0(result, cluster.address, cluster.port)


def _check_rank_0(result: ResultBuilder, host: str, port: int) -> None:
    """Rank 0 answers, which it does only while its process runs."""
    address = f"{host}:{port}"
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        result.warning(f"{address} refuses connections: no process listens yet", "start rank 0 first, or at the same time")
    except TimeoutError:
        fix = "start rank 0's host, correct its address, or open this port in the firewall"
        result.warning(f"{address}: no answer in {CONNECT_SECONDS:g} s; its host is down or a firewall blocks the port", fix)
    except OSError as error:
        result.warning(f"{address} cannot be reached ({error.strerror})", "check the route to rank 0's host, or its address")
    else:
        result.ok(f"{address} answers")


def _check_port(result: ResultBuilder, host: str, *, port: int, required: bool) -> None:
    try:
        bound = coordination.bind_address(host, port)
    except (ConfigError, OSError) as error:
        reason = "is in use" if isinstance(error, ConfigError) else f"cannot be opened ({error.strerror})"
        if required:
            result.error(f"port {port} {reason}", "end the process that listens there (ss -tlnp), or choose another port")
        else:
            result.warning(f"port {port} {reason}", "choose another by --coordinator HOST:PORT (needed for several processes)")
        return
    if required and bound.startswith(("0.0.0.0", "[::]")):
        remark = f"{host} is not an address of this host alone: rank 0 listens on port {port} on all interfaces"
        result.warning(remark, "give an address of rank 0 on the network if it has one")
    result.ok(f"port {port} is free")
