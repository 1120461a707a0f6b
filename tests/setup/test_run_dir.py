import errno
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxdp import file_locks
from jaxdp.config import Config, Model
from jaxdp.errors import ConfigError
from jaxdp.setup import run_dir
from jaxdp.setup.run_dir import class_names


def test_prepare_run_dir_with_unreadable_config_raises(tmp_path):
    (tmp_path / "config.json").write_text('{"seed": 0, "flavor": "red"}')
    with pytest.raises(ConfigError, match=r"its config\.json cannot be read \(flavor: unknown field"):
        run_dir.prepare_run_dir(tmp_path, Config(model=Model(classes=10)))


@pytest.mark.parametrize(
    ("workdir", "reason"),
    [
        ("link", "{0}/link is a link to nowhere, which does not exist"),
        ("link/run", "{0}/link is a link to nowhere, which does not exist"),
        ("loop", "{0}/loop is a link to loop, which does not exist"),
        ("file", "is a file"),
        ("file/run", "Not a directory"),
    ],
)
def test_directory_that_cannot_be_created_raises_with_its_cause(tmp_path, workdir, reason):
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error, run_dir.lock_run_dir(tmp_path / workdir):
        pass
    assert error.value.reason == reason.format(tmp_path)
    assert not (tmp_path / "nowhere").exists()


def test_directory_whose_name_is_not_utf_8_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^--workdir=.*: must be UTF-8"):
        run_dir.resolve_workdir(tmp_path / os.fsdecode(b"run-\xff"), Config())


def test_link_to_a_directory_is_a_working_directory(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    with run_dir.lock_run_dir(tmp_path / "link/run"):
        assert (tmp_path / "disk/run/.lock").exists()


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def without_locks(request, monkeypatch):
    """A file system without locks, as some NFS, Lustre and FUSE mounts are."""

    def flock(file, operation):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(file_locks, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(file_locks, "WATCH_SECONDS", 0.5)


def test_without_locks_a_run_says_so_and_still_excludes_other_processes(tmp_path, without_locks, monkeypatch):
    lines = []
    with run_dir.lock_run_dir(tmp_path, lines.append):
        (line,) = lines
        assert re.fullmatch(
            rf"the file system /\S* \(\w+\) has no locks: {tmp_path}/.in_use\.\* shows other processes .*", line
        )
        assert run_dir.in_use(tmp_path)
        for host in (socket.gethostname(), "another-host"):  # the latter sees that the file is written again and again
            with monkeypatch.context() as patch:
                patch.setattr(socket, "gethostname", lambda host=host: host)
                with pytest.raises(ConfigError, match="another process is training in it"), run_dir.lock_run_dir(tmp_path):
                    pass
    assert not run_dir.in_use(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_without_locks_the_record_of_a_killed_process_does_not_stop_a_run(tmp_path, without_locks):
    ended, unreaped = (subprocess.Popen(["true"]) for _ in range(2))
    ended.wait()
    os.waitid(os.P_PID, unreaped.pid, os.WEXITED | os.WNOWAIT)
    with file_locks.hold_record(tmp_path / "own"):
        own = json.loads(next(tmp_path.glob("own.*")).read_text())
    reused = subprocess.Popen(["sleep", "60"])  # began after this process, whose record has its number now
    killed = [{**own, "process": process} for process in (ended.pid, unreaped.pid, reused.pid, "x", 2**80)]
    for record in (*killed, {**own, "started": 1}, {**own, "host": "another"}, {**own, "container": "another"}, {}, []):
        (tmp_path / ".in_use.other").write_text(json.dumps(record))
        assert not run_dir.in_use(tmp_path)
        with run_dir.lock_run_dir(tmp_path):
            assert run_dir.in_use(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    unreaped.wait()
    reused.kill()
    reused.wait()


@pytest.mark.parametrize("pause", ["create", "look"])
def test_without_locks_two_processes_never_both_hold_a_run(tmp_path, without_locks, monkeypatch, pause):
    """Whatever one of them does while the other one is between two of its steps, beside the record of a killed one."""
    (tmp_path / ".in_use.killed").write_text(json.dumps({"host": "another"}))
    held, real = [], {"create": file_locks.write_atomically, "look": file_locks.record_is_held}

    def step(name, *arguments, **options):
        """Let the other process begin just before or just after this step of the first one."""
        monkeypatch.undo()
        for attribute, value in (("REFRESH_SECONDS", 0.01), ("WATCH_SECONDS", 0.1)):
            monkeypatch.setattr(file_locks, attribute, value)
        other = stack.enter_context(file_locks.hold_record(tmp_path / ".in_use"))
        held.append(other)
        return real[name](*arguments, **options)

    name = {"create": "write_atomically", "look": "record_is_held"}[pause]
    monkeypatch.setattr(file_locks, name, lambda *arguments, **options: step(pause, *arguments, **options))
    with ExitStack() as stack:
        held.append(stack.enter_context(file_locks.hold_record(tmp_path / ".in_use")))
        assert held.count(True) <= 1
    with file_locks.hold_record(tmp_path / ".in_use") as is_ours:
        assert is_ours


def test_without_locks_a_process_of_another_user_or_container_is_seen(tmp_path, without_locks, monkeypatch):
    def denied(process, signal):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    def absent(process, signal):
        raise ProcessLookupError

    with file_locks.hold_record(tmp_path / ".in_use") as is_ours, monkeypatch.context() as patch:
        assert is_ours
        patch.setattr(os, "kill", denied)
        assert file_locks.record_is_held(tmp_path / ".in_use")
        patch.setattr(os, "kill", absent)
        patch.setattr(os, "readlink", lambda path: "pid:[1]")  # where the number belongs to no process, or to another one
        with file_locks.hold_record(tmp_path / ".in_use") as other:
            assert not other


@pytest.mark.parametrize(("writes_after", "watch", "held"), [(0.9, 1.0, True), (1.2, 1.0, False), (0.9, 0.0, False)])
def test_process_that_cannot_be_seen_holds_a_record_if_it_writes_while_it_is_watched(
    tmp_path, monkeypatch, writes_after, watch, held
):
    now, record = [0.0], tmp_path / "x.other"
    record.write_text(json.dumps({"host": "another"}))

    def sleep(seconds):
        assert seconds > 0
        now[0] += seconds
        if now[0] >= writes_after:
            record.write_text(json.dumps({"host": "another", "refreshed": now[0]}))

    monkeypatch.setattr(file_locks, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert file_locks.record_is_held(tmp_path / "x", **({"watch_seconds": watch} if watch else {})) is held
    assert now[0] == pytest.approx(writes_after if held else watch, abs=0.1)
    assert record.exists()


def test_file_system_is_that_of_the_innermost_and_last_mount(tmp_path, monkeypatch):
    lines = ["rootfs / ext4 rw 0 0", "a /absent xfs rw 0 0", r"b /absent/my\040runs lustre rw 0 0", "c /absent nfs4 rw 0 0"]
    monkeypatch.setattr(file_locks, "Path", lambda name: {"/proc/self/mounts": tmp_path / "mounts"}.get(name) or Path(name))
    assert file_locks.file_system("/absent/x") == "the file system / (unknown)"
    (tmp_path / "mounts").write_text("\n".join(lines))
    (tmp_path / "link").symlink_to("/absent/x")
    monkeypatch.chdir(tmp_path)
    found = {"/absent/x": "/absent (nfs4)", "/absent/my runs/x": "/absent/my runs (lustre)", "/absents": "/ (ext4)"}
    found |= {"link": "/absent (nfs4)", "x": "/ (ext4)"}
    assert {path: file_locks.file_system(path) for path in found} == {
        path: f"the file system {words}" for path, words in found.items()
    }


def test_a_lock_that_is_no_file_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=rf"{tmp_path}/.lock: Is a directory; remove it, or"), run_dir.lock_run_dir(tmp_path):
        pass
    (tmp_path / ".lock").rmdir()
    (tmp_path / ".lock").symlink_to(".lock")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/.lock: Too many levels of symbolic"), run_dir.lock_run_dir(tmp_path):
        pass


def test_a_second_process_is_refused_while_the_lock_is_held(tmp_path, monkeypatch):
    real = fcntl.flock

    def as_on_nfs(file, operation):
        """NFS gives a shared lock only to a file that is open for reading, an exclusive one only for writing."""
        unfit = {fcntl.LOCK_SH: os.O_WRONLY, fcntl.LOCK_EX: os.O_RDONLY}[operation & (fcntl.LOCK_SH | fcntl.LOCK_EX)]
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == unfit:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    with run_dir.lock_run_dir(tmp_path):
        assert run_dir.in_use(tmp_path)
        with pytest.raises(ConfigError, match="another process is training in it"), run_dir.lock_run_dir(tmp_path):
            pass
    assert not run_dir.in_use(tmp_path)


def test_next_free_returns_the_first_directory_without_a_run(tmp_path):
    for name in ("run", "run-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "run-3").mkdir()
    assert run_dir.next_free(tmp_path / "run") == tmp_path / "run-3"
    assert run_dir.next_free(tmp_path / "other") == tmp_path / "other"


def test_class_names_without_a_file_are_numbers_and_a_damaged_file_raises(tmp_path):
    assert class_names(tmp_path, 3) == ["class 0", "class 1", "class 2"]
    (tmp_path / "classes.json").write_text('["a", "b", "c", "d"]')
    with pytest.raises(ConfigError, match=r"its classes.json has more than 3 names"):
        class_names(tmp_path, 3)


def test_class_names_are_utf_8_in_every_locale(tmp_path):
    code = (
        "import pathlib, sys; from jaxdp.setup.run_dir import class_names, write_class_names;"
        "here = pathlib.Path(sys.argv[1]); write_class_names(here, ['L\\xf6wenzahn']); print(ascii(class_names(here, 1)))"
    )
    plain = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    out = subprocess.run([sys.executable, "-c", code, tmp_path], env=plain, capture_output=True, text=True, check=True).stdout
    assert out.strip() == r"['L\xf6wenzahn']"
    assert "Löwenzahn".encode() in (tmp_path / "classes.json").read_bytes()
