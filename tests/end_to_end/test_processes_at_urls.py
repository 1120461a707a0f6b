"""Several processes that share no directory train at a URL; each has local copies of its own, as on another machine."""

import os
import shutil
import subprocess
import time

import pytest
from helpers.constants import short_leases
from helpers.processes import CACHE_EVERYTHING, LONG, ONE_PHASE, ROOT, TIMEOUT, launch, outcome, place, wait_for_exit

from jaxdp.checkpoint.manifest import verify_files
from jaxdp.cloud.location import open_location
from jaxdp.cloud.remote_run import RemoteRun, download_checkpoint, download_run_files

pytestmark = pytest.mark.slow
SAVES = [*LONG, "--checkpoint.every-epochs", "0.75"]


def start(folder, url, port):
    """Two processes with four virtual devices each, and a storage directory each."""
    processes = []
    for rank in range(2):
        storage = folder / f"machine-{rank}"
        command = [*short_leases(), "train", "--workdir", url, *ONE_PHASE, *SAVES, "--mesh.cpu-devices", "4"]
        environment = os.environ | CACHE_EVERYTHING | place(rank, 2, port)
        with open(folder / f"out-{rank}", "w") as out:
            processes.append(
                subprocess.Popen(
                    [*command, "--storage.directory", str(storage)], cwd=ROOT, env=environment, stdout=out, stderr=out
                )
            )
    return processes


def test_processes_without_a_shared_directory_resume_from_the_url_alone(tmp_path, free_port):
    whole = tmp_path / "whole"
    wait_for_exit(launch(2, whole, *SAVES))
    url = f"file://{tmp_path}/bucket/run"
    processes = start(tmp_path, url, free_port)
    remote, end = RemoteRun(open_location(url, "--workdir")), time.monotonic() + TIMEOUT
    while not remote.checkpoints(remote.newest_lease()) and time.monotonic() < end:
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait()
    newest = remote.checkpoints(remote.newest_lease())[0]
    parts = {name.split("/")[1] for name in remote.read_manifest(newest).files}
    assert parts == {"part-0", "part-1"}
    for rank in range(2):
        shutil.rmtree(tmp_path / f"machine-{rank}")
    codes = [process.wait(timeout=TIMEOUT) for process in start(tmp_path, url, free_port)]
    out = (tmp_path / "out-0").read_text()
    assert codes == [0, 0], out
    assert "resuming from " in out
    copy = tmp_path / "copy"
    verify_files(download_checkpoint(url, "--workdir", copy))
    download_run_files(url, copy, names=("metrics.jsonl", "result.json"), field="--workdir")
    assert outcome(copy) == outcome(whole)
