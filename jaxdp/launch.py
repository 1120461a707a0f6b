"""`jaxdp launch`: the processes of a run on this machine, started, watched and ended together."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque

from jaxdp.config import ConfigError
from jaxdp.errors import EXIT_CONFIG, EXIT_STOPPED

KILLED = 128
GRACE_SECONDS = 10.0  # for the others to end by themselves after the first one has
POLL_SECONDS = 0.05
LAST_LINES = 20


class Process:
    """One of them: its output goes to ours, each line behind its rank."""

    def __init__(self, rank: int, command: list[str], environment: dict, write):
        self.rank, self.last, self.ended, self.killed = rank, deque(maxlen=LAST_LINES), None, False
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes from here, once
        )
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self.readers = [threading.Thread(target=self._read, args=(*pair, write), daemon=True) for pair in streams]
        for reader in self.readers:
            reader.start()

    def _read(self, stream, to, write):
        for line in stream:
            self.last.append(line.rstrip("\n"))
            write(to, f"[{self.rank}] {line if line.endswith(chr(10)) else line + chr(10)}")

    def poll(self, now: float) -> int | None:
        """Its exit code, once it has ended."""
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = now
            for reader in self.readers:
                reader.join(1)
        return code

    def signal(self, number) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by SIGSTOP and the like: it will neither end nor answer."""
        try:
            with open(f"/proc/{self.process.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False


def launch(command: list[str], processes: int, restarts: int = 0) -> int:
    """Run a command as `processes` processes of one run, again up to `restarts` times where one fails; its exit code.

    0: all are done; 75: they were asked to stop and have saved; else the code of the first that failed, 128 + N for signal N.
    command: a Python script with its arguments, or any program with its own. Each process is told the others' place by JAX's
    variables (see `jaxdp.parallel.cluster`).
    """
    if processes < 1:
        raise ConfigError(f"--processes: {processes} is not allowed; give 1 or more")
    if restarts < 0:
        raise ConfigError(f"--restarts: {restarts} is not allowed; give 0 or more")
    if not command:
        raise ConfigError("launch: no command is given; put it behind --, as in jaxdp launch --processes 2 -- train.py")
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    signals = []
    before = {one: signal.signal(one, lambda number, frame: signals.append(number)) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        for left in range(restarts, -1, -1):
            code = _once(command, processes, signals)
            if code in (0, EXIT_CONFIG, EXIT_STOPPED) or signals or not left:
                return code
            _say(f"starting again; {left - 1} more restart{'s' * (left != 2)} after this one")
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    raise AssertionError


def _say(text: str) -> None:
    print(f"jaxdp launch: {text}", file=sys.stderr, flush=True)


def _once(command: list[str], processes: int, signals: list[int]) -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes), "PYTHONUNBUFFERED": "1"}
    writing = threading.Lock()

    def write(to, line):
        with writing, contextlib.suppress(BrokenPipeError, ValueError):
            to.write(line)
            to.flush()

    started, running = time.monotonic(), []
    try:
        for rank in range(processes):
            running.append(Process(rank, command, os.environ | place | {"JAX_PROCESS_ID": str(rank)}, write))
    except OSError as error:
        for one in running:
            one.signal(signal.SIGKILL)
        raise ConfigError(f"launch: {command[0]!r} cannot be started ({error.strerror})") from None
    passed_on, first, killed = 0, None, started
    while True:
        now = time.monotonic()
        codes = [one.poll(now) for one in running]
        if None not in codes:
            break
        while passed_on < len(signals):
            for one in running:
                one.signal(signals[passed_on] if passed_on == 0 else signal.SIGKILL)
            passed_on += 1
        first = first or next((one for one, code in zip(running, codes, strict=True) if code not in (None, 0)), None)
        if first and now - max(first.ended, killed) > GRACE_SECONDS:
            for one in running:
                if one.ended is None:
                    _say(f"rank {one.rank} {'is stopped and' if one.is_stopped else 'still runs and'} is killed")
                    one.signal(signal.SIGKILL)
                    one.killed = True
            killed = now  # again, if that were not the end
        time.sleep(POLL_SECONDS)
    failed = [one for one, code in zip(running, codes, strict=True) if code not in (0, EXIT_STOPPED)]
    if not failed:
        return EXIT_STOPPED if EXIT_STOPPED in codes else 0
    first = min(failed, key=lambda one: (one.killed, not _came_by_itself(one), one.ended))
    code = first.process.returncode
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    _say(f"rank {first.rank} failed first, {how}, after {first.ended - started:.0f} s. Its last lines:")
    for line in first.last:
        print(f"[{first.rank}] {line}", file=sys.stderr)
    sys.stderr.flush()
    return KILLED - code if code < 0 else code


def _came_by_itself(one: Process) -> bool:
    """Whether a process failed by itself: not one that only says that another has."""
    said = [line for line in one.last if line.startswith("jaxdp: rank ")]
    return not any(not line.startswith(f"jaxdp: rank {one.rank} ") for line in said)
