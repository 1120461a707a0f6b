"""How this host is reached, and what a launcher has told this process."""

import errno
import os
import socket
from pathlib import Path

from jaxdp.config import ConfigError
from jaxdp.doctor.finding import Findings, told_apart
from jaxdp.parallel import cluster

LAUNCHERS = ("JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS", "COORDINATOR_", "NUM_PROCESSES", "PROCESS_ID", "MASTER_")
LAUNCHERS += ("WORLD_SIZE", "RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_", "SLURM_")
REACHED_SECONDS = 3.0
SHOWN = 8  # variables, of which Slurm sets dozens


def host(findings: Findings, given: dict | None = None) -> None:
    """The host's name resolves, which the processes of several hosts need. given: as to `cluster.find`."""
    name = socket.gethostname()
    try:
        addresses = sorted({one[4][0] for one in socket.getaddrinfo(name, None)})
    except OSError as error:
        found = f"the name {name!r} does not resolve ({error.strerror})"
        findings.warn(found, "only several hosts need it: put the name into /etc/hosts or the DNS")
        return
    told = f"{name} is {', '.join(addresses)}"
    if not all(map(_loopback, addresses)):
        findings.ok(told)
    elif _several_hosts(given or {}):
        findings.warn(
            f"{told}, for this host alone", "let the name stand for an address of the network in /etc/hosts or the DNS"
        )
    else:
        findings.ok(f"{told}, for this host alone")


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def _several_hosts(given: dict) -> bool:
    """Whether the processes of the run are declared on other hosts too."""
    try:
        team = cluster.find(**given)
    except ConfigError:  # of which `launcher` tells
        return False
    return team is not None and team.processes > 1 and not _loopback(team.address)


def interfaces(findings: Findings) -> None:
    """Network interfaces that are up, with the speed that the driver tells."""
    found = []
    for _, name in socket.if_nameindex():
        if name != "lo" and _told(name, "operstate") in ("up", "unknown"):
            speed = _told(name, "speed")
            found.append(name + (f" {int(speed) / 1000:g} Gbit/s" if speed.isdigit() else ""))
    findings.ok(", ".join(found) or "none but the loopback")
    folder = Path("/sys/class/infiniband")
    if folder.is_dir() and (cards := sorted(one.name for one in folder.iterdir())):
        findings.ok(f"InfiniBand or RoCE: {', '.join(cards)}")


def _told(name: str, what: str) -> str:
    try:
        return Path("/sys/class/net", name, what).read_text().strip()
    except OSError:  # by driver
        return ""


def launcher(findings: Findings, given: dict | None = None) -> None:
    """The variables of a launcher, what jaxdp makes of them, and whether the port at rank 0 is free, or reached from here.

    given: as to `cluster.find`.
    """
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(LAUNCHERS)}
    try:
        team = cluster.find(**(given or {}))
    except ConfigError as error:
        findings.wrong(*told_apart(str(error), "mend the launcher's variables, or give --cluster none to train alone"))
        return
    if team is None:
        findings.ok("one process alone")
        if remark := cluster.alone_in_a_larger_job():
            findings.warn(remark.partition(": ")[0], remark.partition(": ")[2])
    else:
        findings.ok(f"{team.launcher}: rank {team.rank} of {team.processes}, rank 0 at {team.address}:{team.port}")
        try:
            socket.getaddrinfo(team.address, team.port)
        except OSError as error:
            found_here = f"{team.address} does not resolve ({error.strerror})"
            findings.wrong(found_here, "put it into /etc/hosts or the DNS, or give rank 0's address")
            return
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        findings.ok(", ".join(f"{name}={value}" for name, value in list(found.items())[:SHOWN]) + more)
    if team is None or team.rank == 0:
        _port(findings, team.port if team else cluster.PORT, needed=team is not None)
    elif team:
        _reached(findings, team.address, team.port)


def _reached(findings: Findings, address: str, port: int) -> None:
    """Whether rank 0 answers, which it does only while its process runs."""
    there = f"{address}:{port}"
    try:
        socket.create_connection((address, port), REACHED_SECONDS).close()
    except ConnectionRefusedError:
        findings.warn(f"{there} refuses: nothing listens there yet", "start rank 0 first, or at the same time")
    except TimeoutError:
        mend = "start rank 0's host, give its address, or let the network pass this port"
        findings.warn(f"{there} does not answer in {REACHED_SECONDS:g} s: its host is down, or a firewall is between", mend)
    except OSError as error:
        findings.warn(f"{there} is not reached ({error.strerror})", "see to the route to rank 0's host, or give its address")
    else:
        findings.ok(f"{there} answers")


def _port(findings: Findings, port: int, needed: bool) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            found = f"port {port} {'is in use' if taken else f'cannot be listened at ({error.strerror})'}"
            if needed:
                findings.wrong(found, "end what listens there (ss -tlnp), or give the launcher another port")
            else:
                findings.warn(found, "only several processes need it: give another by --coordinator HOST:PORT")
            return
    findings.ok(f"port {port} is free")
