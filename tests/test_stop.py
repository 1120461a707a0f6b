"""Real processes that are asked to stop, killed, or hang."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdp.training import seal
from jaxdp.training.metrics import TIMING, read_log

ROOT = Path(__file__).parent.parent
PATIENCE = 300  # seconds: a slow machine is no failure
TINY = [
    *("--data.source", "synthetic", "--data.image-size", "8", "--data.train-examples", "64", "--data.eval-examples", "10"),
    *("--model.depth", "18", "--model.width", "2", "--model.stem", "small", "--mesh.cpu-devices", "2", "--epochs", "16"),
    *("--batch.0.global-batch", "8", "--batch.0.until-epoch", "8", "--batch.1.global-batch", "16"),
    *("--logging.no-tensorboard", "--logging.every-steps", "1"),
]


def started(workdir, *more, **environment):
    command = [sys.executable, "-u", "-m", "jaxdp", "train", "--workdir", str(workdir), *TINY, *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True)


def wait_for(condition, process):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.02)


def lines_of(workdir):
    log = workdir / "metrics.jsonl"
    return len(log.read_bytes().splitlines()) if log.exists() else 0


def finished(workdir) -> tuple:
    process = started(workdir)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    log = [
        {name: value for name, value in record.items() if name not in TIMING} for record in read_log(workdir / "metrics.jsonl")
    ]
    result = json.loads((workdir / "result.json").read_text())
    return log, result["accuracy"], result["loss"], seal.newest_good(workdir / "checkpoints").arrays


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_compilation_ends_with_75_and_one_line(tmp_path, number):
    process = started(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"))
    for line in process.stdout:
        if line.startswith("compiling"):
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75
    assert err == f"jaxdp: stopped by {number.name} before the first step; the same command begins again\n"


@pytest.mark.slow
def test_sigterm_sigkill_and_a_second_signal_lose_nothing(tmp_path, uninterrupted):
    """Stopped in training, killed later, stopped by two signals, then finished: the same bits, and no line twice or missing."""
    process = started(tmp_path)
    wait_for(lambda: lines_of(tmp_path) > 20, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75
    assert "jaxdp: stopped by SIGTERM after step " in err
    assert "the same command goes on from it" in err
    before = lines_of(tmp_path)

    process = started(tmp_path)
    wait_for(lambda: lines_of(tmp_path) > before + 40, process)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL

    process = started(tmp_path)
    before = lines_of(tmp_path)
    wait_for(lambda: lines_of(tmp_path) > before + 20, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode in (1, 75)  # 75 where the second found the run saved already
    assert finished(tmp_path) == uninterrupted


@pytest.mark.slow
def test_the_slurm_script_of_the_docs_saves_and_requeues(tmp_path):
    """Its own lines, with srun and scontrol that do what Slurm's do for one task, and Slurm's signal to the task alone."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL)
    (tmp_path / "job.sh").write_text(script.replace("python train.py", f"{sys.executable} -u {ROOT / 'train.py'}"))
    for name, text in (
        ("srun", f'echo $$ > {tmp_path / "task"}; exec "$@"'),
        ("scontrol", f'echo "$@" > {tmp_path / "requeued"}'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    config = tmp_path / "config.py"
    config.write_text(f"from jaxdp import load_config\ndef config():\n    return load_config('digits', {TINY})\n")
    script = (
        (tmp_path / "job.sh")
        .read_text()
        .replace("imagenet_goyal_256", str(config))
        .replace("runs/goyal", str(tmp_path / "run"))
    )
    (tmp_path / "job.sh").write_text(script)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    pipe = subprocess.PIPE
    job = subprocess.Popen(["bash", tmp_path / "job.sh"], env=environment, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path)
    wait_for(lambda: lines_of(tmp_path / "run") > 5, job)
    os.kill(int((tmp_path / "task").read_text()), signal.SIGTERM)
    _, err = job.communicate(timeout=PATIENCE)
    assert job.returncode == 75, err
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    assert seal.newest_good(tmp_path / "run/checkpoints") is not None


HANGS = """
import threading, time
from jaxdp.training.watchdog import Watchdog
def stands_still():
    time.sleep(600)
threading.Thread(target=stands_still, daemon=True).start()
with Watchdog(0.4, "do this") as watchdog:
    watchdog.busy("step 1")
    time.sleep(0.2)
    watchdog.busy("step 2")
    time.sleep(0.2)
    watchdog.rest()
    time.sleep(1)
    print("rested", flush=True)
    watchdog.busy("step 3")
    time.sleep(600)
"""


def test_a_step_that_does_not_end_ends_the_process_and_tells_where_every_thread_stands():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stdout == "rested\n"
    assert "in stands_still" in done.stderr
    assert done.stderr.splitlines()[-1] == "jaxdp: step 3 has not ended in 0.4 seconds; do this"


FULL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))  # a larger file cannot be written, as on a full disk
from jaxdp.cli import main
main(["train", *sys.argv[1:]])
"""


@pytest.mark.slow
def test_a_run_goes_on_when_its_checkpoints_cannot_be_written(tmp_path):
    short = [
        *TINY,
        "--epochs",
        "4",
        "--batch.0.until-epoch",
        "2",
        "--schedule.warmup-epochs",
        "1",
        "--logging.every-steps",
        "8",
    ]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, "--workdir", str(tmp_path), *short],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "could not be saved" in done.stdout
    assert "the run goes on, and there is no other checkpoint yet" in done.stdout
    assert json.loads((tmp_path / "result.json").read_text())["epochs"] == 4
    assert not list((tmp_path / "checkpoints").iterdir())
