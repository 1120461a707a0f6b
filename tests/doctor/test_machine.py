"""Checks of memory, cores, disks and limits."""

import os
import tempfile
from pathlib import Path

import pytest
from helpers.doctor import run_check

from jaxdp.config import Checkpoint, Compile, Config, Data
from jaxdp.doctor import machine


@pytest.mark.parametrize(
    ("workdir", "state_bytes", "status", "message"),
    [
        ("runs/a", 1000, "ok", "5 checkpoints: 0 MB"),
        ("runs/a", 2**60, "error", "5 checkpoints: 5,368,709,120.0 GiB"),
        ("runs/a", None, "ok", "the size of a checkpoint is unknown"),
        ("file/a", 1000, "error", "file is not writable"),
        ("link", 1000, "error", "link is a link to /none/x, which does not exist"),
        ("link/a", None, "error", "link is a link to /none/x, which does not exist"),
    ],
)
def test_check_disk_compares_free_space_with_the_checkpoints(tmp_path, workdir, state_bytes, status, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("/none/x")
    config = Config(checkpoint=Checkpoint(keep=3))
    result = run_check(machine.check_disk, config, workdir=tmp_path / workdir, state_bytes=state_bytes)
    assert result.status == status
    assert message in result.message


@pytest.mark.parametrize(
    ("state_bytes", "input_bytes", "status"), [(2**20, 2**20, "ok"), (2**60, 0, "error"), (None, None, "ok")]
)
def test_check_memory_compares_free_memory_with_state_and_images(state_bytes, input_bytes, status):
    result = run_check(machine.check_memory, state_bytes, input_bytes)
    assert result.status == status
    assert ("unknown" in result.message) == (state_bytes is None)


def test_check_compilation_cache_on_a_full_disk_advises_to_empty_the_cache_unless_it_is_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_free_space", lambda path: (1000, True, path))
    config = Config(compile=Compile(cache=str(tmp_path)))
    result = run_check(machine.check_compilation_cache, config)
    assert result.fix == "free space on its disk, or set --compile.cache to another directory"
    (tmp_path / "program").write_text("")
    assert run_check(machine.check_compilation_cache, config).fix.startswith("empty the cache")


def test_check_compilation_cache_names_a_link_to_nothing_and_expands_the_home_directory(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to("/none/x")
    result = run_check(machine.check_compilation_cache, Config(compile=Compile(cache=str(tmp_path / "link"))))
    assert result.status == "error"
    assert "link is a link to /none/x, which does not exist" in result.message
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "~/programs")
    assert run_check(machine.check_compilation_cache, Config()).message.startswith(f"{tmp_path}/programs: 0 files")


def test_check_disk_with_an_unwritable_tmpdir_warns(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    result = run_check(machine.check_disk, Config(), workdir=tmp_path, state_bytes=1000)
    assert result.status == "warning"
    assert f"TMPDIR={tmp_path / 'missing'} is not writable" in result.message
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert run_check(machine.check_disk, Config(), workdir=tmp_path, state_bytes=1000).status == "ok"


def test_check_cores_compares_the_measured_decoding_speed_with_the_given_rate(monkeypatch):
    folder = Config(data=Data(source="folder", directory="x", image_size=32, augmentation="random_resized_crop"))
    monkeypatch.setattr(machine, "MEASURE_SECONDS", 0.02)
    assert machine.images_per_core_second(folder) > 1
    monkeypatch.setattr(machine, "images_per_core_second", lambda config: 1000.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})

    def check(config, rate):
        return run_check(machine.check_cores, config, images_per_second=rate, devices=2)

    assert "give --images-per-second" in check(folder, None).message
    assert check(folder, 1900.0).status == "ok"
    result = check(folder, 2500.0)
    assert result.status == "warning"
    assert "5,000 images/s need 5.0 cores" in result.message
    assert check(Config(data=Data(source="digits")), 1e9).status == "ok"


def test_check_shared_memory_without_a_tmpfs_warns_with_several_gpus(monkeypatch):
    monkeypatch.setattr(machine, "Path", lambda _: Path("/no-such-directory"))
    assert run_check(machine.check_shared_memory, 1).status == "ok"
    assert run_check(machine.check_shared_memory, 2).status == "warning"
