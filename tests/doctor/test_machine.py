"""Checks of memory, disks and limits."""

from pathlib import Path

import pytest
from helpers.doctor import run_check

from jaxdp.config import Checkpoint, Config
from jaxdp.doctor import machine


@pytest.mark.parametrize(
    ("workdir", "state_bytes", "status", "message"),
    [
        ("runs/a", 1000, "ok", "5 checkpoints: 0 MB"),
        ("runs/a", 2**60, "error", "5 checkpoints: 5,368,709,120.0 GiB"),
        ("file/a", 1000, "error", "file is not writable"),
        ("link/a", 1000, "error", "link is a link to /none/x, which does not exist"),
    ],
)
def test_check_disk_compares_free_space_with_the_checkpoints(tmp_path, workdir, state_bytes, status, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("/none/x")
    config = Config(checkpoint=Checkpoint(keep=3))
    result = run_check(machine.check_disk, config, workdir=tmp_path / workdir, state_bytes=state_bytes)
    assert result.status == status
    assert message in result.message


@pytest.mark.parametrize(("state_bytes", "status"), [(2**20, "ok"), (2**60, "error")])
def test_check_memory_compares_free_memory_with_a_copy_of_the_state(state_bytes, status):
    assert run_check(machine.check_memory, state_bytes).status == status


def test_check_disk_with_a_full_disk_of_compiled_programs_warns(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "_free_space", lambda path: (1000 if path.name == "cache" else 2**40, tmp_path))
    result = run_check(machine.check_disk, Config(), workdir=tmp_path, state_bytes=1000)
    assert (result.status, "JAX_COMPILATION_CACHE_DIR" in result.fix) == ("warning", True)


def test_check_limits_without_shared_memory_warns_with_several_gpus(monkeypatch):
    monkeypatch.setattr(machine, "SHARED_MEMORY", Path("/no-such-directory"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "--shm-size" not in str(run_check(machine.check_limits).fix)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "--shm-size" in run_check(machine.check_limits).fix
