"""The sockets on which rank 0 listens: at the coordinator's address only, if that is an address of this host."""

import errno
import ipaddress
import socket
from contextlib import suppress

BACKLOG = 128
NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(address: str, port: int) -> tuple[list[socket.socket], str]:
    """Sockets listening at `address` (a host name or number), and a warning if they listen on all interfaces instead.

    Rank 0 listens on all interfaces if the address is not local (a Kubernetes service, NAT), if the name does not resolve
    on this host, and if it resolves to the loopback on this host alone, as in Debian's /etc/hosts. Raises OSError if the
    port is taken.
    """
    try:
        resolved = [(entry[0], entry[4]) for entry in socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM)]
        reason = "is not an address of this host"
    except OSError as error:
        resolved, reason = [], f"does not resolve on this host ({error.strerror})"
    if resolved and not is_loopback(address) and all(is_loopback(str(target[0])) for _, target in resolved):
        resolved, reason = [], "resolves to the loopback on this host, which other hosts cannot reach"
    sockets: list[socket.socket] = []
    try:
        for family, target in dict.fromkeys(resolved):
            try:
                sockets.append(socket.create_server(target, family=family, backlog=BACKLOG))
            except OSError as error:
                if error.errno not in NOT_LOCAL:
                    raise
        if sockets:
            return sockets, ""
        return [_all_interfaces(port)], f"{address} {reason}: rank 0 listens on port {port} on all interfaces"
    except OSError:
        for listening in sockets:
            listening.close()
        raise


def _all_interfaces(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=BACKLOG)


def is_loopback(address: str) -> bool:
    """Whether an address, a name or a number, means the local host on every host."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def local_address(listening: socket.socket) -> tuple[str, int]:
    """(address, port) at which this host itself reaches a listening socket."""
    address, port = listening.getsockname()[:2]
    if address in ("", "0.0.0.0", "::"):
        return ("127.0.0.1", port)  # a dual-stack socket accepts IPv4 too
    scope = listening.getsockname()[3] if listening.family == socket.AF_INET6 else 0
    return (f"{address}%{socket.if_indextoname(scope)}" if scope else address, port)


def format_address(address: str, port: int) -> str:
    """HOST:PORT or [IPv6]:PORT."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
