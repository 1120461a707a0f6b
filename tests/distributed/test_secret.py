import os
import stat
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from helpers.control import cluster_of

from jaxdp.distributed.launchers import Cluster
from jaxdp.distributed.secret import Secret, SecretUnavailable
from jaxdp.errors import ConfigError


def test_secret_file_is_readable_by_its_owner_only_and_removed_with_its_directories(tmp_path, free_port):
    folder = tmp_path / "runs" / "digits"
    secrets = [Secret(cluster_of(free_port, rank), folder, {}) for rank in range(2)]
    with pytest.raises(SecretUnavailable, match=r"cannot read rank 0's secret .*\(No such file or directory\)"):
        secrets[1].read()
    key = secrets[0].create()
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secrets[1].read() == key
    secrets[0].remove()
    assert not (tmp_path / "runs").exists()


def test_secret_of_the_environment_writes_no_file(tmp_path):
    secret = Secret(cluster_of(1, 0), tmp_path, {"JAXDP_SECRET": "x" * 32})
    assert secret.create() == Secret(cluster_of(1, 1), None, {"JAXDP_SECRET": "x" * 32}).read()
    assert not list(tmp_path.iterdir())


def test_key_differs_between_jobs_with_the_same_secret():
    keys = {Secret(Cluster("slurm", "h", 1, 1, 2, job), None, {"JAXDP_SECRET": "x" * 32}).read() for job in ("1.0", "2.0")}
    assert len(keys) == 2


def test_secret_without_variable_and_directory_raises_with_both_fixes():
    with pytest.raises(ConfigError) as error:
        Secret(cluster_of(1, 1), None, {})
    assert error.value.field == "JAXDP_SECRET"
    assert "no shared working directory" in error.value.reason
    assert "`jaxdp launch`" in error.value.hint
    assert "\n" not in str(error.value)


def test_secret_that_is_too_short_raises_without_showing_it():
    with pytest.raises(ConfigError) as error:
        Secret(cluster_of(1, 1), None, {"JAXDP_SECRET": "hunter"})
    assert (error.value.field, error.value.reason) == ("JAXDP_SECRET", "has 6 characters, fewer than 16")
    assert "hunter" not in str(error.value)


@pytest.mark.parametrize("kind", ["missing", "a directory", "a link", "too long", "a pipe"])
def test_read_of_a_file_that_rank_0_did_not_write_raises(tmp_path, free_port, kind):
    file, secret = tmp_path / f".secret-{free_port}", Secret(cluster_of(free_port, 1), tmp_path, {})
    if kind == "a directory":
        file.mkdir()
    elif kind == "a link":
        (tmp_path / "other").write_text("0" * 64)
        file.symlink_to("other")
    elif kind == "too long":
        file.write_text("0" * 65)
    elif kind == "a pipe":
        os.mkfifo(file)
    with pytest.raises(SecretUnavailable, match="cannot read rank 0's secret"):
        secret.read()


def test_read_of_another_users_file_raises_unless_that_user_owns_the_directory(tmp_path, free_port, monkeypatch):
    """In a directory that is open to all, such as /tmp. The owner of the directory could replace the file anyway."""
    key, fstat = Secret(cluster_of(free_port, 0), tmp_path, {}).create(), os.fstat
    other, uid = Secret(cluster_of(free_port, 1), tmp_path, {}), os.geteuid() + 1
    assert other.read() == key

    def fstat_of_another_user(descriptor):
        status = fstat(descriptor)
        return SimpleNamespace(st_mode=status.st_mode, st_size=status.st_size, st_uid=uid)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat_of_another_user)
        with pytest.raises(SecretUnavailable, match=rf"\(another user wrote it, uid {uid}\)"):
            other.read()
        real_stat = os.stat
        patch.setattr(os, "stat", lambda path: SimpleNamespace(st_uid=uid) if path == tmp_path else real_stat(path))
        assert other.read() == key  # a file system may give all files to one user


def test_remove_with_a_pipe_in_place_of_the_secret_does_not_block(tmp_path, free_port):
    secret, file = Secret(cluster_of(free_port, 0), tmp_path, {}), tmp_path / f".secret-{free_port}"
    secret.create()
    file.unlink()
    os.mkfifo(file)
    with ThreadPoolExecutor(1) as thread:
        removed = thread.submit(secret.remove)
        try:
            removed.result(timeout=10)
        finally:
            os.close(os.open(file, os.O_RDWR))  # releases a blocked reader
    assert file.is_fifo()
