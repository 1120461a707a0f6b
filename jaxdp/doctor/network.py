"""Checks of host name, network interfaces and the variables of a launcher."""

import errno
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

from jaxdp.distributed import handshake, launchers, listener
from jaxdp.distributed.secret import ENVIRONMENT, FILE, FIX, MIN_CHARS, VARIABLE
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
CONNECT_SECONDS, CHALLENGE_SECONDS = 3.0, 1.0
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
    if not all(map(listener.is_loopback, addresses)):
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
    return cluster is not None and cluster.num_processes > 1 and not listener.is_loopback(cluster.address)


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
    if cluster is not None and cluster.num_processes > 1:
        _check_secret(result)
    if cluster is None:
        _check_port(result, "0.0.0.0", port=launchers.DEFAULT_PORT, required=False)
    elif cluster.rank == 0:
        _check_port(result, cluster.address, port=cluster.port, required=True)
    else:
        _check_rank_0(result, cluster.address, cluster.port)


def _check_rank_0(result: ResultBuilder, host: str, port: int) -> None:
    """Rank 0 answers, which it does only while its process runs, and its secret has the same source as here."""
    address = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            rank_0_source = _secret_source(connection)
    except ConnectionRefusedError:
        result.warning(f"{address} refuses connections: no process listens yet", "start rank 0 first, or at the same time")
    except TimeoutError:
        fix = "start rank 0's host, correct its address, or open this port in the firewall"
        result.warning(f"{address}: no answer in {CONNECT_SECONDS:g} s; its host is down or a firewall blocks the port", fix)
    except OSError as error:
        result.warning(f"{address} cannot be reached ({error.strerror})", "check the route to rank 0's host, or its address")
    else:
        source = ENVIRONMENT if os.environ.get(VARIABLE) else FILE
        if rank_0_source not in ("", source):
            with_secret, without = ("rank 0", "this process") if rank_0_source == ENVIRONMENT else ("this process", "rank 0")
            result.error(f"{address} answers, but {VARIABLE} is set on {with_secret} and not on {without}", FIX)
        else:
            result.ok(f"{address} answers" + (" as rank 0 of a run" if rank_0_source else ""))


def _secret_source(connection: socket.socket) -> str:
    """Source of the secret that a listening rank 0 announces, ENVIRONMENT or FILE; "" if something else listens."""
    connection.settimeout(CHALLENGE_SECONDS)
    try:
        challenge = json.loads(connection.recv(handshake.MAX_HANDSHAKE_LINE_BYTES))
        return challenge["secret"] if challenge["jaxdp"] and challenge["secret"] in (ENVIRONMENT, FILE) else ""
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return ""


def _check_secret(result: ResultBuilder) -> None:
    """The secret with which processes authenticate is long enough, if it is set."""
    secret = os.environ.get(VARIABLE, "")
    if secret and len(secret) < MIN_CHARS:
        result.error(f"{VARIABLE} has {len(secret)} characters; at least {MIN_CHARS} are required", FIX)
    elif secret:
        result.ok(f"{VARIABLE} is set")
    else:
        result.ok(f"{VARIABLE} is not set: rank 0 writes a secret into the working directory, which all hosts must share")


def _check_port(result: ResultBuilder, host: str, *, port: int, required: bool) -> None:
    try:
        sockets, remark = listener.listen(host, port)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        if required:
            result.error(f"port {port} {reason}", "end the process that listens there (ss -tlnp), or choose another port")
        else:
            result.warning(f"port {port} {reason}", "choose another by --coordinator HOST:PORT (needed for several processes)")
        return
    for listening in sockets:
        listening.close()
    if remark:
        result.warning(remark, "give an address of rank 0 on the network if it has one")
    result.ok(f"port {port} is free")
