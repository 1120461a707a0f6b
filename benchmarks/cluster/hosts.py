"""Virtual hosts on one Linux machine: network namespaces connected by links with a chosen rate, which can be cut.

    with Hosts(2, rate="100mbit") as hosts:
        server = hosts.popen(0, [sys.executable, "server.py"])
        client = hosts.popen(1, [sys.executable, "client.py", hosts.name(0)])

Each host has its own name, loopback and network interface, and resolves the names of all hosts. They share the machine's files,
processors, memory and clock; a process can lose a directory, as if its host had mounted it over the network. Needs root and
Debian's package iproute2.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "jaxdp-h"
SWITCH = f"{PREFIX}-switch"  # a namespace too, so that the machine's routes and firewall have no effect
HOSTS_FILE = Path("/run/jaxdp-hosts")
BURST = "256kb"  # burst that an idle link passes without delay: 20 ms at 100mbit, enough for 10gbit between timer ticks
QUEUE = "50ms"


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip() or result.returncode}")
    return result.stdout


class Hosts:
    """Context manager for `number` hosts, numbered from 0. Leaving it kills the processes that still run on them.

    rate: limit of each link, in each direction, in the notation of `tc` ("100mbit", "1gbit"); None for no limit.
    """

    def __init__(self, number: int, rate: str | None = None):
        self.number, self._first_rate = number, rate

    def __enter__(self):
        missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if not shutil.which(tool)]
        if missing:
            raise RuntimeError(f"{missing[0]} not found; install Debian's packages iproute2 and util-linux")
        if os.geteuid() != 0:
            raise RuntimeError("network namespaces require root; run as root")
        self._lock = socket.socket(socket.AF_UNIX)
        try:
            self._lock.bind("\0jaxdp-hosts")  # an abstract name, which disappears with its process
        except OSError:
            raise RuntimeError("another process on this machine uses its hosts; end it first") from None
        try:
            self._remove()
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        try:
            self._remove()
        finally:
            self._lock.close()

    def _make(self):
        lines = ["127.0.0.1 localhost", *(f"{self.address(host)} {self.name(host)}" for host in range(self.number))]
        HOSTS_FILE.write_text("\n".join(lines) + "\n")
        _run("ip", "netns", "add", SWITCH)
        _run("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", SWITCH, "link", "set", "bridge", "up")
        for host in range(self.number):
            name = self.name(host)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", SWITCH, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", SWITCH, "link", "set", name, "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", link, "up")
        if self._first_rate:
            self.rate(self._first_rate)

    def _remove(self):
        """Remove these hosts, or those left behind by a process that was killed."""
        names = [path.name for path in Path("/run/netns").glob(f"{PREFIX}*")]
        for name in names:
            while pids := _run("ip", "netns", "pids", name).split():
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.02)
            _run("ip", "netns", "delete", name)
        HOSTS_FILE.unlink(missing_ok=True)

    def name(self, host: int) -> str:
        if host not in range(self.number):
            raise RuntimeError(f"host {host} does not exist; there are {self.number}")
        return f"{PREFIX}{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def popen(self, host: int, command: list[str], **options) -> subprocess.Popen:
        """Start a command on the host. Each wrapper program replaces itself by the next, so signals reach the command."""
        enter = ["nsenter", f"--net=/run/netns/{self.name(host)}", "unshare", "--uts", "--mount"]
        set_up_host = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        return subprocess.Popen([*enter, "sh", "-c", set_up_host, self.name(host), str(HOSTS_FILE), *command], **options)

    def rate(self, rate: str | None) -> None:
        """Limit all links, in both directions; None removes the limit."""
        limit = ["tbf", "rate", rate, "burst", BURST, "latency", QUEUE] if rate else ["noqueue"]
        for name in map(self.name, range(self.number)):
            _run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *limit)
            _run("tc", "-n", SWITCH, "qdisc", "replace", "dev", name, "root", *limit)

    def cut(self, host: int) -> None:
        """Cut the link of a host silently: packets are lost, and its own interface stays up."""
        _run("ip", "-n", SWITCH, "link", "set", self.name(host), "down")

    def reconnect(self, host: int) -> None:
        """Restore a link that was cut."""
        _run("ip", "-n", SWITCH, "link", "set", self.name(host), "up")

    @contextlib.contextmanager
    def without_directory(self, process: subprocess.Popen, path: Path) -> Iterator[None]:
        """Let a process of a host lose a directory, as if the server of a network file system did not answer (a hard mount).

        What it opens there waits until it is killed; open files stay open. It sees a FUSE file system in place of the
        directory, whose requests get no answer.
        """
        namespace, device = f"/proc/{process.pid}/ns/mnt", os.open("/dev/fuse", os.O_RDWR)
        try:
            while os.readlink(namespace) == os.readlink("/proc/self/ns/mnt"):  # it has not reached its host
                time.sleep(0.002)
            options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
            mount = ["mount", "--internal-only", "-t", "fuse", "-o", options, "lost", str(path)]
            subprocess.run(["nsenter", f"--mount={namespace}", *mount], pass_fds=[device], check=True)
            yield
        finally:
            os.close(device)

    def bytes(self, host: int) -> tuple[int, int]:
        """Bytes (received, sent) by the host so far, including all headers."""
        (link,) = json.loads(_run("ip", "-n", self.name(host), "-json", "-statistics", "link", "show", "eth0"))
        return link["stats64"]["rx"]["bytes"], link["stats64"]["tx"]["bytes"]
