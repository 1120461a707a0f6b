"""Runs of whole processes on this machine: started by `jaxdp launch` or one by one, followed, and compared."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from jaxdp.checkpoint.listing import latest_valid
from jaxdp.run_records import TIMING, read_log

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # seconds: a slow machine is no failure
TINY = ["--config", str(Path(__file__).with_name("tiny_run.py"))]
ONE_PHASE = ["--config", str(Path(__file__).with_name("one_phase_run.py"))]
LONG = ["--epochs", "24"]  # 96 steps of it, so that it does not end before a signal
# A ResNet in place of its network:
RESNET = ["--model.name", "resnet", "--model.depth", "18", "--model.width", "2", "--model.stem", "small"]
CACHE_EVERYTHING = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def place(rank, processes, port) -> dict[str, str]:
    """The variables with which a process finds the other processes of its run."""
    return {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(rank),
    }


def popen(command, environment=None, *, cwd=ROOT, **options):
    """A process with pipes for its output. environment: variables in addition to this process's."""
    pipe, variables = subprocess.PIPE, os.environ | (environment or {})
    return subprocess.Popen(command, cwd=cwd, env=variables, stdout=pipe, stderr=pipe, text=True, **options)


def launch(processes, workdir, *more, recipe=ONE_PHASE, devices=None, restarts=0, command=(), environment=None, **options):
    """`jaxdp launch` of a recipe, with eight devices in total."""
    command = command or ["train.py", "--workdir", str(workdir), *recipe, "--mesh.cpu-devices", str(devices or 8 // processes)]
    launcher = [sys.executable, "-m", "jaxdp", "launch", "--processes", str(processes), "--restarts", str(restarts), "--"]
    return popen([*launcher, *command, *more], CACHE_EVERYTHING | (environment or {}), **options)


def wait_for_exit(process, code=0) -> tuple[str, str]:
    """What the process has printed to stdout and stderr, once it has exited with this code."""
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == code, (process.returncode, out, err)
    return out, err


def outcome(workdir) -> tuple:
    """What a finished run leaves that does not depend on time: its log, first metric, array digests and loss."""
    log = [{name: value for name, value in line.items() if name not in TIMING} for line in read_log(workdir / "metrics.jsonl")]
    result = json.loads((workdir / "result.json").read_text())
    return log, next(iter(result.values())), latest_valid(workdir / "checkpoints").arrays, result["loss"]


def pids_of(launcher, processes) -> list[int]:
    """The process ids of the ranks that a launcher has started, by rank."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        pids = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
                variables = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == str(launcher.pid):
                pids |= {int(text[15:]): int(path.name) for text in variables if text.startswith(b"JAX_PROCESS_ID=")}
        if len(pids) == processes:
            return [pids[rank] for rank in range(processes)]
        time.sleep(0.05)
    raise AssertionError("the processes did not start")


def log_lines(workdir) -> int:
    log = workdir / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def wait_until(condition, process=None) -> None:
    """Wait until a condition holds. process: must run until then."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_lines(workdir, number, process) -> None:
    """Wait until the log of a running process has so many lines."""
    wait_until(lambda: log_lines(workdir) >= number, process)
