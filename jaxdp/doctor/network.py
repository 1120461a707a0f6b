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
SHOWN = 8  # variables, of which Slurm sets dozens


def host(findings: Findings) -> None:
    """The host's name resolves, which the processes of several hosts need."""
    name = socket.gethostname()
    try:
        addresses = sorted({one[4][0] for one in socket.getaddrinfo(name, None)})
    except OSError as error:
        found = f"the name {name!r} does not resolve ({error.strerror})"
        findings.warn(found, "only several hosts need it: put the name into /etc/hosts or the DNS")
        return
    local = all(one.startswith("127.") or one == "::1" for one in addresses)
    findings.ok(f"{name} is {', '.join(addresses)}" + (", for this host alone" if local else ""))


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


def launcher(findings: Findings) -> None:
    """The variables of a launcher, what jaxdp makes of them, and whether the port at rank 0 is free."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(LAUNCHERS)}
    try:
        team = cluster.find()
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
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        findings.ok(", ".join(f"{name}={value}" for name, value in list(found.items())[:SHOWN]) + more)
    if team is None or team.rank == 0:
        _port(findings, team.port if team else cluster.PORT, needed=team is not None)


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
