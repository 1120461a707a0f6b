"""Runs on a real Slurm of two nodes, which are all this machine."""

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_processes import PATIENCE, ROOT, TINY, done, launched, left, wait_for_lines

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [
    name for name in ("munged", "sbatch", "scontrol", "slurmctld", "slurmd", "srun") if not shutil.which(name, path=PATH)
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING) or os.geteuid() != 0,
        reason=f"needs root and Debian's packages slurm-wlm and munge (missing: {', '.join(MISSING) or 'root'})",
    ),
]
HOSTS = [*TINY, *("--mesh.cpu-devices", "2", "--mesh.vertical", "2", "--mesh.horizontal", "2")]
# Slurm looks every 30 s whether a signal is due. 408 steps of at least 0.1 s are not over by then, however quick the machine.
LONG = ["--epochs", "100", "--evaluation.every-epochs", "10", "--checkpoint.every-epochs", "10"]
PACED = """
import sys, time
from jaxdp.cli import run
from jaxdp.data.feed import Feeder

def paced(*arguments, at_once=Feeder.next):
    time.sleep(0.1)
    return at_once(*arguments)

Feeder.next = paced
run("train", sys.argv[1:], "train.py")
"""


class Slurm:
    """The commands of a Slurm that runs already. folder: where its configuration is."""

    def __init__(self, folder: Path):
        own = {"PATH": PATH, "PYTHONPATH": str(ROOT), "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment = os.environ | own | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def popen(self, *command: str, **options) -> subprocess.Popen:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdout=pipe, stderr=pipe, text=True, **options)

    def run(self, *command: str, **options) -> tuple[str, str]:
        """What it prints to stdout and stderr; its exit code must be 0."""
        return done(self.popen(*command, **options))


class Job:
    """A batch job. poll and communicate are those of a process, for `wait_for_lines`."""

    def __init__(self, slurm: Slurm, script: Path, *options: str):
        self.slurm, self.output = slurm, script.with_suffix(".out")
        line = ["sbatch", "--parsable", "--chdir", str(script.parent), "--output", str(self.output), *options, str(script)]
        self.number = slurm.run(*line)[0].strip()

    def shown(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S+)", self.slurm.run("scontrol", "show", "job", "--oneliner", self.number)[0]))

    def poll(self) -> str | None:
        state = self.shown()["JobState"]
        return None if state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED") else state

    def communicate(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait_until(self, condition) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, (self.shown(), self.communicate())
            time.sleep(0.1)

    def limit(self, minutes: int) -> None:
        self.slurm.run("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    script = str(ROOT / "benchmarks/cluster/slurm.sh")
    with open(tmp_path_factory.getbasetemp().parent / "slurm.lock", "w") as lock:  # its ports are there once
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["bash", script, "start", str(folder)], check=True)
        yield Slurm(folder)
        subprocess.run(["bash", script, "stop", str(folder)], check=True)


def test_the_script_of_the_docs_stops_at_its_limit_is_requeued_and_ends_as_if_left_alone(slurm, tmp_path):
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL)
    for ours, theirs in {
        "python train.py": f"{shlex.quote(sys.executable)} train.py",
        "--config imagenet_goyal_256": shlex.join([*HOSTS, *LONG]),
        "--workdir runs/goyal": "--workdir cut",
    }.items():
        assert script.count(ours) == 1, ours
        script = script.replace(ours, theirs)
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "train.py").write_text(PACED)
    done(launched(2, tmp_path / "whole", "--mesh.vertical", "2", "--mesh.horizontal", "2", *LONG, devices=2))

    job = Job(slurm, tmp_path / "job.sh")
    wait_for_lines(tmp_path / "cut", 5, job)
    hours, minutes, _ = map(int, job.shown()["RunTime"].split(":"))
    job.limit(60 * hours + minutes + 2)  # the signal, two minutes before it, is due
    job.wait_until(lambda: job.shown()["Restarts"] != "0" or job.poll())
    job.limit(240)
    job.wait_until(job.poll)

    told, shown = job.communicate(), job.shown()
    assert shown["JobState"] == "COMPLETED", (shown, told)
    stops = re.findall(r"stopped by SIGTERM (?:to rank 1 on node2 )?after step (\d+) .* the last good checkpoint is ", told)
    assert [0 < int(step) < 408 for step in stops] == [True], told
    result = json.loads((tmp_path / "cut/result.json").read_text())
    assert (result["processes"], result["hosts"], result["mesh"], result["steps"]) == (2, 2, [2, 2], 408)
    assert result["sessions"] == int(shown["Restarts"]) + 1 == 2
    assert left(tmp_path / "cut") == left(tmp_path / "whole")


def test_srun_alone_starts_a_run_on_both_nodes(slurm, tmp_path):
    line = ["srun", "-N2", "-n2", sys.executable, "-m", "jaxdp", "train", "--cluster", "slurm", "--workdir", "run"]
    slurm.run(*line, *HOSTS, cwd=tmp_path)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["processes"], result["hosts"], result["mesh"], result["sessions"]) == (2, 2, [2, 2], 1)


def test_a_batch_script_without_srun_is_told_what_it_leaves_unused(slurm, tmp_path):
    line = [sys.executable, "-m", "jaxdp", "train", "--workdir", "run", *TINY, "--mesh.cpu-devices", "4"]
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{shlex.join(line)}\n")
    job = Job(slurm, tmp_path / "job.sh", "--nodes=2", "--ntasks=2")
    job.wait_until(job.poll)
    assert job.poll() == "COMPLETED", job.communicate()
    assert "this Slurm job has 2 tasks, and one process trains alone: start it with srun to use all" in job.communicate()
    assert json.loads((tmp_path / "run/result.json").read_text())["processes"] == 1
