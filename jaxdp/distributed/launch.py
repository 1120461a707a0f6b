"""`jaxdp launch`: starts the processes of a run on this machine, follows them, and ends them together."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO, TextIO

from jaxdp.distributed.signal_handler import StopSignals, handled_by
from jaxdp.errors import EXIT_CONFIG, EXIT_STOPPED, ConfigError, print_safe
from jaxdp.files import discard_output

SIGNAL_EXIT_CODE = 128  # plus the number of the signal
GRACE_SECONDS = 10.0  # for the other processes to exit after the first failure
STOP_SECONDS = 2.0  # for the other processes to exit on their own after one has exited with 75
POLL_SECONDS = 0.05
MAX_PROCESSES = 1024
FAILURE_LINE = re.compile(r"jaxdp: rank (\d+) (?:on \S+ )?(?:failed|was stopped)")
Write = Callable[[TextIO, str], None]


class Process:
    """A process of the run. The launcher copies its output, and puts its rank before each line."""

    def __init__(self, rank: int, command: list[str], environment: dict[str, str]) -> None:
        self.rank = rank
        self.reported: int | None = None  # the rank that it has last reported as failed
        self.ended: float | None = None  # when, by the monotonic clock
        self.killed = False
        self.on_end: Callable[[], None] = lambda: None
        self._readers = list[threading.Thread]()
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # the terminal sends Ctrl-C to the launcher only, which forwards it once
        )

    def copy_output(self, write: Write) -> None:
        outputs = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._readers = [threading.Thread(target=self._copy, args=(*each, write), daemon=True) for each in outputs]
        for reader in self._readers:
            reader.start()

    def _copy(self, source: IO[str], target: TextIO, write: Write) -> None:
        with source:
            for line in source:
                if match := FAILURE_LINE.match(line):
                    self.reported = int(match[1])
                text = line.rstrip("\n")
                write(target, f"[{self.rank}] {text}\n")

    def poll(self, now: float) -> int | None:
        """The exit code, None while the process runs."""
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = now
            self.on_end()
            for reader in self._readers:
                reader.join(1)
        return code

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        self.killed = self.killed or self.ended is None
        self.signal(signal.SIGKILL)

    @property
    def is_aborted(self) -> bool:
        """Whether JAX may have ended the process because rank 0 has ended: JAX then aborts other ranks within milliseconds."""
        return self.rank > 0 and self.process.returncode == -signal.SIGABRT


GUARDIAN = """
import contextlib, os, signal, sys
running = set()
for line in sys.stdin:
    (running.add if line[0] == "+" else running.discard)(int(line[1:]))
for group in running:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGTERM)
"""


class Guardian:
    """A process that sends SIGTERM to the run's processes if the launcher is killed: its input then ends."""

    def __enter__(self) -> "Guardian":
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        command = [sys.executable, "-I", "-S", "-c", GUARDIAN]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=null, stderr=null, start_new_session=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def watch(self, process: Process) -> None:
        """Watch a process until it ends. After that, the system may give its process ID to a new process."""
        self._write(f"+{process.process.pid}")
        process.on_end = lambda: self._write(f"-{process.process.pid}")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def launch(command: list[str], processes: int, restarts: int = 0) -> int:
    """Run a command as `processes` processes of one run, and restart it up to `restarts` times after a failure.

    command: a Python script or any program, with arguments. The processes find each other by JAX's variables (see
    `jaxdp.distributed.launchers`). The first stop signal is forwarded to them; a forced one (see `StopSignals`) kills them. If
    one process exits with 75, the rest get SIGTERM.

    Returns 0 if all succeed, 75 if they were asked to stop and saved, or 137 after a second signal. Otherwise returns the exit
    code of the process that failed first; 128 + N means signal N.
    """
    if not 1 <= processes <= MAX_PROCESSES:
        raise ConfigError("--processes", processes, reason=f"must be from 1 to {MAX_PROCESSES:,}")
    if restarts < 0:
        raise ConfigError("--restarts", restarts, reason="must be 0 or more")
    if not command:
        hint = "add it after --, as in jaxdp launch --processes 2 -- train.py"
        raise ConfigError("command", reason="is missing", hint=hint)
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    elif command[0] == "jaxdp":  # this installation, which may not be on the PATH
        command = [sys.executable, "-m", *command]
    signals, received = list[int](), StopSignals()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received.is_forced(number, time.monotonic()) or not signals:
            signals.append(number)

    with handled_by(on_signal), Guardian() as guardian:
        for remaining in range(restarts, -1, -1):
            code = _run_once(command, processes, signals=signals, guardian=guardian)
            if code in (0, EXIT_CONFIG, EXIT_STOPPED) or signals or not remaining:
                return code
            _print(f"restarting; {remaining - 1} more restart{'s' * (remaining != 2)} after this one")
    raise AssertionError


def _print(text: str) -> None:
    print_safe(f"jaxdp launch: {text}", sys.stderr)


def reserved_port() -> int:
    """A free port of the loopback interface that the system assigns to no other program for a minute.

    If the server closes a connection first, the connection stays in TIME_WAIT. Meanwhile the system does not hand out the
    port. A program that names it and sets SO_REUSEADDR, as rank 0 does, can still listen there.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
    return port


def _run_once(command: list[str], processes: int, *, signals: list[int], guardian: "Guardian") -> int:
    """Start the processes and wait for them. signals: the signals to forward; the list grows meanwhile."""
    variables = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{reserved_port()}",
        "JAX_NUM_PROCESSES": str(processes),
        "PYTHONUNBUFFERED": "1",
    }
    writing = threading.Lock()

    def write(target: TextIO, line: str) -> None:
        with writing, contextlib.suppress(ValueError):
            try:
                target.write(line)
                target.flush()
            except OSError as error:  # `| head`, a full disk: the processes need a reader of their output
                lost = discard_output(target, error)
                if target is sys.stdout:
                    _print(lost)

    started, running = time.monotonic(), list[Process]()
    try:
        for rank in range(processes):
            environment = os.environ | variables | {"JAX_PROCESS_ID": str(rank)}
            running.append(Process(rank, command, environment))
            guardian.watch(running[-1])
            running[-1].copy_output(write)
        return _wait_for_all(running, signals, started)
    except BaseException as error:
        for process in running:
            if process.ended is None:
                process.signal(signal.SIGKILL)
        if len(running) < processes and isinstance(error, OSError):
            hint = "give a program or a script, such as train.py or jaxdp train"
            raise ConfigError("command", command[0], reason=f"cannot be started ({error.strerror})", hint=hint) from None
        raise


def _wait_for_all(running: Sequence[Process], signals: list[int], started: float) -> int:
    """Forward signals until all processes have exited; end them once one has stopped or failed. Returns the exit code."""
    forwarded, first_failed, killed = 0, None, started
    while True:
        now = time.monotonic()
        codes = [process.poll(now) for process in running]
        if None not in codes:
            break
        while forwarded < len(signals):
            for process in running:
                process.kill() if forwarded else process.signal(signals[0])
            forwarded += 1
        failed = (process for process, code in zip(running, codes, strict=True) if code not in (None, 0))
        first_failed = first_failed or next(failed, None)
        stops = [process.ended for process in running if process.ended and process.process.returncode == EXIT_STOPPED]
        if stops and not signals and now - min(stops) > STOP_SECONDS:
            signals.append(signal.SIGTERM)  # a process that was stopped before it connected could not inform the rest
            killed = now
        if first_failed and first_failed.ended is not None and now - max(first_failed.ended, killed) > GRACE_SECONDS:
            for process in running:
                if process.ended is None:
                    _print(f"rank {process.rank} is still running or suspended; killing it")
                    process.kill()
            killed = now  # kills again after the next grace period
        time.sleep(POLL_SECONDS)
    return _exit_code(running, signals, started)


def _exit_code(ended: Sequence[Process], signals: Sequence[int], started: float) -> int:
    """The exit code of the run; prints which process failed first."""
    codes = {process.process.returncode for process in ended}
    if EXIT_STOPPED in codes:
        codes -= {-number for number in signals[:1]}  # of a process that had not set its handler yet
    if codes <= {0, EXIT_STOPPED}:
        return max(codes)
    failed = [process for process in ended if process.process.returncode not in (0, EXIT_STOPPED)]
    if len(signals) > 1 and all(process.killed for process in failed):
        _print("killed after a second signal; the same command continues from the last checkpoint, if there is one")
        return SIGNAL_EXIT_CODE + signal.SIGKILL
    blamed = {process: _blamed_rank(process, len(ended)) for process in failed}
    reporter = min(failed, key=lambda each: (each.killed, each.is_aborted, blamed[each] != each.rank, each.ended or 0.0))
    first = ended[blamed[reporter]]
    _print(f"rank {first.rank} {_describe_exit(first)}, after {(first.ended or started) - started:.0f} s")
    code = reporter.process.returncode
    return SIGNAL_EXIT_CODE - code if code < 0 else code


def _blamed_rank(process: Process, num_processes: int) -> int:
    """The rank that a process has last reported as failed, or its own rank if it has reported none."""
    return process.rank if process.reported is None or process.reported >= num_processes else process.reported


def _describe_exit(process: Process) -> str:
    code = process.process.returncode
    if code == 0:
        return "exited first, with exit code 0, before the end of the run"
    if process.killed:
        return "failed first, and was killed by this launcher"
    return f"failed first, {f'by {signal.Signals(-code).name}' if code < 0 else f'with exit code {code}'}"
