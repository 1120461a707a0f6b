"""Several processes that share no directory train at a URL; each has local copies of its own, as on another machine."""

import shutil

import pytest
from helpers.constants import short_leases
from helpers.processes import CACHE_EVERYTHING, LONG, ONE_PHASE, launch, outcome, place, popen, wait_for_exit, wait_until

from jaxdp.checkpoint.manifest import verify_files
from jaxdp.cloud.lease import newest_lease
from jaxdp.cloud.location import open_location
from jaxdp.cloud.remote_run import RemoteRun, download_checkpoint, download_run_files

pytestmark = pytest.mark.slow
SAVES = [*LONG, "--checkpoint.every-epochs", "0.75"]


def start(folder, url, port):
    """Two processes with four virtual devices each, and a storage directory each."""
    command = [*short_leases(), "train", "--workdir", url, *ONE_PHASE, *SAVES, "--mesh.cpu-devices", "4", "--storage.directory"]
    return [popen([*command, str(folder / f"machine-{rank}")], CACHE_EVERYTHING | place(rank, 2, port)) for rank in range(2)]


def test_processes_without_a_shared_directory_resume_from_the_url_alone(tmp_path, free_port):
    whole = tmp_path / "whole"
    wait_for_exit(launch(2, whole, *SAVES))
    url = f"file://{tmp_path}/bucket/run"
    processes = start(tmp_path, url, free_port)
    remote = RemoteRun(open_location(url, "--workdir"))
    wait_until(lambda: remote.checkpoints(newest_lease(remote.location)))
    for process in processes:
        process.kill()
        process.communicate()
    newest = remote.checkpoints(newest_lease(remote.location))[0]
    parts = {name.split("/")[1] for name in remote.read_manifest(newest).files}
    assert parts == {"part-0", "part-1"}
    for rank in range(2):
        shutil.rmtree(tmp_path / f"machine-{rank}")
    printed = [wait_for_exit(process)[0] for process in start(tmp_path, url, free_port)]
    assert "resuming from " in printed[0]
    copy = tmp_path / "copy"
    verify_files(download_checkpoint(url, "--workdir", copy))
    download_run_files(url, copy, names=("metrics.jsonl", "result.json"), field="--workdir")
    assert outcome(copy) == outcome(whole)
