"""Runs on a real Slurm with two nodes, both on this machine."""

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
from helpers.processes import CACHE_EVERYTHING, ONE_PHASE, ROOT, TIMEOUT, launch, outcome, popen, wait_for_exit, wait_for_lines

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
HOSTS = [*ONE_PHASE, *("--mesh.cpu-devices", "2", "--mesh.vertical", "2", "--mesh.horizontal", "2")]
# Slurm checks every 30 s whether a signal is due. 400 steps of at least 0.1 s take longer on any machine.
LONG = ["--epochs", "100", "--evaluation.every-epochs", "10", "--checkpoint.every-epochs", "10"]
PACED = """
import sys, time
from jaxdp.cli.main import run
from jaxdp.data.prefetch import DeviceIterator

def paced(*arguments, original=DeviceIterator.next):
    time.sleep(0.1)
    return original(*arguments)

DeviceIterator.next = paced
run("train", sys.argv[1:], "train.py")
"""


class Slurm:
    """Runs commands of a Slurm that has been started. folder: contains its configuration."""

    def __init__(self, folder: Path):
        variables = {"PATH": PATH, "PYTHONPATH": str(ROOT), "SLURM_CONF": str(folder / "slurm.conf")}
        self.variables = variables | CACHE_EVERYTHING

    def run(self, *command: str, **options) -> tuple[str, str]:
        """Run a command that must exit with 0; returns its stdout and stderr."""
        return wait_for_exit(popen(command, self.variables, **options))


class Job:
    """A batch job, with `poll` and `communicate` as a subprocess has them, for `wait_for_lines`."""

    def __init__(self, slurm: Slurm, script: Path, *options: str):
        self.slurm, self.output = slurm, script.with_suffix(".out")
        line = ["sbatch", "--parsable", "--chdir", str(script.parent), "--output", str(self.output), *options, str(script)]
        self.number = slurm.run(*line)[0].strip()

    def shown(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S+)", self.slurm.run("scontrol", "show", "job", "--oneliner", self.number)[0]))

    def poll(self) -> str | None:
        """The final state; None while the job waits or runs. A job that is requeued shows another state for a moment."""
        for _ in range(2):
            state = self.shown()["JobState"]
            if state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"):
                return None
            time.sleep(2)
        return state

    def communicate(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait_until(self, condition) -> None:
        end = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < end, (self.shown(), self.communicate())
            time.sleep(0.1)

    def limit(self, minutes: int) -> None:
        self.slurm.run("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    script = str(ROOT / "benchmarks/cluster/slurm.sh")
    with open(tmp_path_factory.getbasetemp().parent / "slurm.lock", "w") as lock:  # its ports are fixed
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["bash", script, "start", str(folder)], check=True)
        yield Slurm(folder)
        subprocess.run(["bash", script, "stop", str(folder)], check=True)


def test_the_documented_script_stops_at_its_time_limit_is_requeued_and_equals_an_uninterrupted_run(slurm, tmp_path):
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL)
    for documented, replacement in {
        "python train.py": f"{shlex.quote(sys.executable)} train.py",
        "--config imagenet_goyal_256": shlex.join([*HOSTS, *LONG]),
        "--workdir runs/goyal": "--workdir cut",
    }.items():
        assert script.count(documented) == 1, documented
        script = script.replace(documented, replacement)
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "train.py").write_text(PACED)
    wait_for_exit(launch(2, tmp_path / "whole", "--mesh.vertical", "2", "--mesh.horizontal", "2", *LONG, devices=2))

    job = Job(slurm, tmp_path / "job.sh")
    wait_for_lines(tmp_path / "cut", 5, job)
    hours, minutes, _ = map(int, job.shown()["RunTime"].split(":"))
    job.limit(60 * hours + minutes + 2)  # the signal, two minutes before it, is due
    job.wait_until(lambda: job.shown()["Restarts"] != "0" or job.poll())
    job.limit(240)
    job.wait_until(job.poll)

    output, job_facts = job.communicate(), job.shown()
    assert job_facts["JobState"] == "COMPLETED", (job_facts, output)
    stops = re.findall(r"stopped by SIGTERM (?:\(rank 1 on node2\) )?after step (\d+) .* the last valid checkpoint is ", output)
    assert [0 < int(step) < 400 for step in stops] == [True], output
    result = json.loads((tmp_path / "cut/result.json").read_text())
    assert (result["processes"], result["hosts"], result["mesh"], result["steps"]) == (2, 2, [2, 2], 400)
    assert result["sessions"] == int(job_facts["Restarts"]) + 1 == 2
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_srun_without_a_batch_script_runs_on_both_nodes(slurm, tmp_path):
    line = ["srun", "-N2", "-n2", sys.executable, "-m", "jaxdp", "train", "--cluster", "slurm", "--workdir", "run"]
    slurm.run(*line, *HOSTS, cwd=tmp_path)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["processes"], result["hosts"], result["mesh"], result["sessions"]) == (2, 2, [2, 2], 1)


def test_a_batch_script_without_srun_warns_of_the_unused_tasks(slurm, tmp_path):
    line = [sys.executable, "-m", "jaxdp", "train", "--workdir", "run", *ONE_PHASE, "--mesh.cpu-devices", "4"]
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{shlex.join(line)}\n")
    job = Job(slurm, tmp_path / "job.sh", "--nodes=2", "--ntasks=2")
    job.wait_until(job.poll)
    assert job.poll() == "COMPLETED", job.communicate()
    assert "this Slurm job has 2 tasks, but only one process trains: start it with srun to use all" in job.communicate()
    assert json.loads((tmp_path / "run/result.json").read_text())["processes"] == 1
