"""A proxy that delays every request and takes little processor time for it: haproxy with Lua (apt-get install haproxy).

    with DelayProxy(server_port, seconds=0.05) as proxy:
        ...                                  # clients of proxy.port
        proxy.forget(); print(proxy.requests())

It has the interface of tests/helpers/fault_proxy.py that tests/helpers/object_storage.py needs.
"""

import csv
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from helpers.object_storage import free_port

START_SECONDS = 10
CONFIG = """
global
  lua-load {folder}/delay.lua
  stats socket {folder}/control level admin
  maxconn 4000
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend clients
  bind 127.0.0.1:{port}
  http-request lua.delay
  default_backend server
backend server
  http-reuse always
  server server 127.0.0.1:{upstream}
"""
DELAY = 'core.register_action("delay", {{"http-req"}}, function() core.msleep({milliseconds}) end)\n'


class DelayProxy:
    """haproxy in front of a server at a port of this machine. seconds: how long it keeps each request."""

    def __init__(self, upstream: int, *, seconds: float, answers: str = "") -> None:
        if shutil.which("haproxy") is None:
            sys.exit("haproxy is not installed: apt-get install haproxy")
        self.upstream, self.milliseconds = upstream, round(1000 * seconds)
        self.port = free_port()

    def __enter__(self) -> "DelayProxy":
        self._directory = tempfile.TemporaryDirectory()
        self._folder = Path(self._directory.name)
        (self._folder / "delay.lua").write_text(DELAY.format(milliseconds=self.milliseconds))
        (self._folder / "config").write_text(CONFIG.format(folder=self._folder, port=self.port, upstream=self.upstream))
        self.process = subprocess.Popen(["haproxy", "-db", "-q", "-f", str(self._folder / "config")])
        deadline = time.monotonic() + START_SECONDS
        while not (self._folder / "control").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit("haproxy did not start")
            time.sleep(0.02)
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        self._directory.cleanup()

    def forget(self) -> None:
        """Count requests from 0."""
        self._control("clear counters all")

    def requests(self) -> int:
        """How many requests came since the start, or since `forget`."""
        rows = csv.DictReader(self._control("show stat").removeprefix("# ").splitlines())
        return next(int(row["req_tot"]) for row in rows if (row["pxname"], row["svname"]) == ("clients", "FRONTEND"))

    def _control(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(self._folder / "control"))
            control.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: control.recv(1 << 16), b"")).decode()
