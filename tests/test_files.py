"""Paths that a user names: what is no local, regular file is refused in one line, before anything is read."""

import dataclasses
import io
import json
import os
import pwd
import resource
import stat
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.runs import train_shown

import jaxdp
from jaxdp.cloud.local import local_directory
from jaxdp.config import Config, Data, Finetune, Storage
from jaxdp.data.decode import ImageError
from jaxdp.data.image_folder import ImageFolder, find_images
from jaxdp.data.tfds import prepare
from jaxdp.errors import ConfigError
from jaxdp.files import (
    NotRegularError,
    allow_open_files,
    check_no_password,
    check_output,
    create_atomically,
    discard_output,
    expand_user,
    is_run,
    is_url,
    known_recipes,
    no_directory_reason,
    open_regular,
    read_regular,
    user_cache,
    write_atomically,
    write_output,
)
from jaxdp.inference.predict import Images
from jaxdp.loggers.console import Screen
from jaxdp.report import report
from jaxdp.setup import run_dir
from jaxdp.validation import validate
from jaxdp.xla.options import cache_directory


def irregular(place: Path) -> list[Path]:
    """A pipe, a link to an endless device, and a directory: each blocks, never ends, or is no file."""
    pipe, endless, folder = place / "pipe.png", place / "endless.png", place / "folder.png"
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    folder.mkdir()
    return [pipe, endless, folder]


def test_open_regular_of_a_pipe_device_or_directory_raises(tmp_path):
    for path in irregular(tmp_path):
        with pytest.raises(NotRegularError, match=r"not a regular file|Is a directory"):
            open_regular(path)
        with pytest.raises(NotRegularError):
            open_regular(path, "ab")
    (tmp_path / "sparse").write_bytes(b"")
    os.truncate(tmp_path / "sparse", 10**12)
    with pytest.raises(OSError, match="File too large"):
        read_regular(tmp_path / "sparse")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(tmp_path / "loop")


def test_open_regular_appends_and_follows_links(tmp_path):
    with open_regular(tmp_path / "new", "ab") as file:
        file.write(b"one ")
        assert (tmp_path / "new").read_bytes() == b"one "  # at once
    os.umask(mask := os.umask(0))
    assert stat.S_IMODE(os.stat(tmp_path / "new").st_mode) == 0o666 & ~mask
    with open_regular(tmp_path / "new", "ab") as file:
        file.write(b"two")
    (tmp_path / "link").symlink_to("new")
    assert read_regular(tmp_path / "link") == b"one two"
    with open_regular(tmp_path / "new") as file:
        assert isinstance(file, io.BufferedReader)


def test_file_that_becomes_a_pipe_before_it_is_opened_is_refused_and_closed(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    before, opened = os.stat(tmp_path / "file"), os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path: before)
        with pytest.raises(NotRegularError):
            open_regular(tmp_path / "pipe")
    assert len(os.listdir("/proc/self/fd")) == len(opened)


def test_images_that_are_not_regular_files_raise_image_error(tmp_path):
    folder = tmp_path / "train/only"
    folder.mkdir(parents=True)
    paths = irregular(folder)
    for source, images in ((ImageFolder.open(tmp_path / "train"), 2), (Images(sorted(paths)), 3)):
        assert len(source) == images  # a directory in a class is searched for images
        for index in range(images):
            with pytest.raises(ImageError, match=r"not a regular file|Is a directory"):
                source[index]


@pytest.mark.parametrize("name", ["config.json", "result.json", "metrics.jsonl", "classes.json", ".lock"])
def test_run_directory_with_a_pipe_in_place_of_a_file_does_not_block(tiny, tmp_path, name):
    with run_dir.lock_run_dir(tmp_path):
        run_dir.prepare_run_dir(tmp_path, tiny)
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    calls = {
        "config.json": [lambda: run_dir.prepare_run_dir(tmp_path, tiny), lambda: run_dir.run_config(tmp_path)],
        "result.json": [lambda: run_dir.prepare_run_dir(tmp_path, tiny)],
        "metrics.jsonl": [lambda: report(tmp_path)],
        "classes.json": [lambda: run_dir.class_names(tmp_path, 3)],
        ".lock": [lambda: run_dir.lock_run_dir(tmp_path).__enter__()],
    }
    for call in calls[name]:
        with pytest.raises(ConfigError, match=r"^--workdir=|holds no run"):
            call()
    assert not run_dir.in_use(tmp_path)


@pytest.mark.parametrize(("command", "flag"), [("train", "--finetune.weights"), ("train", "--name"), ("report", "--output")])
def test_url_on_the_command_line_exits_with_2_and_one_line(failing, tmp_path, monkeypatch, command, flag):
    monkeypatch.chdir(tmp_path)
    line = failing(command, flag, "gs://bucket/x.safetensors")
    assert line.endswith("='gs://bucket/x.safetensors': URLs are not supported; use a local path")
    assert list(tmp_path.iterdir()) == []


def test_write_atomically_replaces_the_content_and_leaves_no_other_file(tmp_path):
    write_atomically(tmp_path / "x.json", json.dumps([1, 2]))
    write_atomically(tmp_path / "x.json", json.dumps([3]))
    assert json.loads((tmp_path / "x.json").read_text()) == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_file_of_at_most_the_limit_is_read(tmp_path):
    (tmp_path / "x").write_bytes(b"123")
    assert read_regular(tmp_path / "x", most=3) == b"123"
    with pytest.raises(OSError, match="File too large"):
        read_regular(tmp_path / "x", most=2)


@pytest.mark.parametrize("sync", [False, True])
def test_write_atomically_takes_text_bytes_or_a_file_and_syncs_what_it_wrote(tmp_path, monkeypatch, sync):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    for data in ("\u00e9", "\u00e9".encode(), io.BytesIO("\u00e9".encode())):
        write_atomically(tmp_path / "x", data, sync=sync)
        assert (tmp_path / "x").read_bytes() == b"\xc3\xa9"
    write_atomically(tmp_path / "x", b"")
    assert synced == [2, 2, 2] * sync


def test_a_write_that_fails_names_the_file_and_leaves_nothing(tmp_path):
    create_atomically(tmp_path / "x", b"old")
    (tmp_path / "folder").mkdir()
    for call in (
        lambda: create_atomically(tmp_path / "x", b"new"),
        lambda: write_atomically(tmp_path / "none/x", b"new"),
        lambda: write_atomically(tmp_path / "folder", b"new"),
    ):
        with pytest.raises(OSError, match=r"(File exists|No such file or directory|Is a directory): '.*/(x|none/x|folder)'$"):
            call()
    assert sorted(os.listdir(tmp_path)) == ["folder", "x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_check_output_accepts_what_write_output_can_write(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    for name, overwrite in (("new", False), ("a/b/new", False), ("pipe", False), ("file", True), ("link", True)):
        assert check_output(tmp_path / name, overwrite) == tmp_path / name
    for name, reason in (("file", "file exists; use another"), ("link", "file exists; use another"), ("", "is a directory")):
        with pytest.raises(ConfigError, match=reason):
            check_output(tmp_path / name, overwrite=False)
    with pytest.raises(ConfigError, match=rf"--output='{tmp_path}/file/x': '{tmp_path}/file' is not a writable directory"):
        check_output(tmp_path / "file/x", overwrite=True)
    with pytest.raises(ConfigError, match="--csv='': must be a file"):
        check_output("", True, "--csv")
    with pytest.raises(ConfigError, match="URLs are not supported"):
        check_output("s3://bucket/x", overwrite=True)
    (tmp_path / "inside").symlink_to("file/x")
    with pytest.raises(ConfigError, match=rf"'{tmp_path}/file' is not a writable directory"):
        check_output(tmp_path / "inside", overwrite=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_output("~/new", overwrite=False) == tmp_path / "new"
    write_output(tmp_path / "a/b/new", b"x")
    assert (tmp_path / "a/b/new").read_bytes() == b"x"
    modes = []
    monkeypatch.setattr(os, "access", lambda folder, mode: modes.append(mode))  # root may write anywhere
    with pytest.raises(ConfigError, match="is not a writable directory"):
        check_output(tmp_path / "a/c/new", overwrite=False)
    assert modes == [os.W_OK | os.X_OK]


def test_why_a_directory_cannot_be_created(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("nowhere")
    missing = OSError(2, "the system's words")
    link = f"{tmp_path}/link is a link to nowhere, which does not exist"
    for name, reason in (("file", "is a file"), ("link", link), ("link/x", link), ("x", "the system's words")):
        assert no_directory_reason(tmp_path / name, missing) == reason
    assert no_directory_reason(tmp_path, OSError("text")) == "text"


def test_recipes_and_caches_of_the_user_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/digits.py").write_bytes(b"")
    assert known_recipes()["digits"] == Path("configs/digits.py")
    assert known_recipes()["imagenet_goyal_256"].is_absolute()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "jaxdp"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert user_cache() == Path("/home/me/.cache/jaxdp")


def test_write_output_goes_through_links_and_into_pipes(tmp_path):
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    link.symlink_to(file)
    write_output(link, b"new")
    assert (link.is_symlink(), file.read_bytes()) == (True, b"new")
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as thread:
        read_through = thread.submit(pipe.read_bytes)
        write_output(pipe, b"new")
        assert read_through.result(timeout=60) == b"new"
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        write_output(Path("/dev/full"), b"new")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://KEY:secret@bucket/x", "s3://...@bucket/x"),
        ("http://user:secret@host:9000/x", "http://...@host:9000/x"),
        ("https://secret@host/x", "https://...@host/x"),
        ("simplecache::s3://KEY:secret@bucket", "simplecache::s3://...@bucket"),
        (" s3://KEY:secret@bucket/x\n", "s3://...@bucket/x"),
        ("https://host/x?a=1&X-Amz-Signature=secret&b=2", "https://host/x?a=1&X-Amz-Signature=...&b=2"),
        ("https://host/x?sig=secret", "https://host/x?sig=..."),
        ("https://me:secret@host/?key=secret#token=secret", "https://...@host/?key=...#token=..."),
    ],
)
def test_a_url_with_a_password_is_refused_without_showing_it(url, shown):
    with pytest.raises(ConfigError) as error:
        check_no_password(url, "--workdir")
    assert str(error.value).startswith(
        f"--workdir={shown!r}: must not hold a password or key, which would be stored and shown; "
    )
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("protocol", "field", "hint"),
    [
        ("s3a", "--workdir", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("simplecache::S3", "--workdir", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("gs", "--workdir", "set GOOGLE_APPLICATION_CREDENTIALS to a file"),
        ("https", "--workdir", "give the URL without it"),
        ("https", "--logging.mlflow", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("https", "logging.mlflow", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
    ],
)
def test_a_password_is_refused_with_the_variables_that_hold_it(protocol, field, hint):
    with pytest.raises(ConfigError, match=f"; {hint}"):
        check_no_password(f"{protocol}://KEY:secret@bucket/x", field)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a:b@c",
        "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/a@b",
        "http://host:8080/a@b",
        "https://host/token=a/key?author=Jane&monkey=b&tokenizer=c",
    ],
)
def test_a_url_without_a_password_is_accepted(url):
    check_no_password(url, "--workdir")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--workdir", "URL"],
        ["train", "--logging.mlflow", "URL"],
        ["plan", "--data.directory", "URL"],
        ["predict", "--workdir", "runs/x", "URL"],
        ["watch", "URL"],
        ["checkpoints", "URL"],
        ["data", "URL"],
        ["launch", "--processes", "2", "--", "train.py", "--workdir", "URL"],
    ],
    ids=" ".join,
)
def test_no_command_shows_or_stores_the_password_of_a_url(arguments, tmp_path, monkeypatch, failing):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    line = failing(*(argument.replace("URL", "s3://KEY:secret@bucket/x") for argument in arguments))
    assert "must not hold a password or key, which would be stored and shown; set " in line
    assert "secret@" not in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [jaxdp.train, jaxdp.evaluate])
def test_no_call_shows_or_stores_the_password_of_a_url(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="must not hold a password or key"):
        call(jaxdp.load_config("digits"), "s3://KEY:secret@bucket/x")
    assert not [path for path in tmp_path.rglob("*") if "secret" in path.name]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home directory with a recipe, and another current directory, where nothing may be created."""
    (tmp_path / "home").mkdir()
    (tmp_path / "current").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "current")
    (tmp_path / "home/recipe.py").write_text(
        "import jaxdp\nfrom jaxdp.config import Data\n"
        "def config():\n    return jaxdp.Config(name='r', data=Data(source='folder', directory='~/images'))\n"
    )
    yield tmp_path / "home"
    assert os.listdir() == []


@pytest.fixture
def homeless(home, monkeypatch):
    """A user without HOME and without an entry of passwd, as in containers with a random user."""

    def unknown(*_):
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize(
    "call",
    [
        lambda path, config: jaxdp.train(config, path),
        lambda path, config: jaxdp.evaluate(None, path),
        lambda path, config: jaxdp.load_config(f"{path}/none.py"),
        lambda path, config: find_images([f"{path}/none"]),
        lambda path, config: prepare("/none", path),
    ],
)
def test_python_functions_expand_the_home_directory(home, tiny, monkeypatch, call):
    (home / "x").write_text("no directory")
    with pytest.raises(ConfigError) as error:
        call(Path("~/x"), tiny)
    assert "~" not in str(error.value)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without an entry of passwd
    with pytest.raises(ConfigError, match="the home directory of this user is unknown; set HOME, or write the whole path"):
        call(Path("~/x"), tiny)


def test_python_config_expands_the_home_directory_in_every_path(home):
    config = Config(storage=Storage(directory="~"), finetune=Finetune(weights="~/w"))
    config = validate(dataclasses.replace(config, data=Data(source="folder", directory="~/d")))
    paths = (config.storage.directory, config.finetune.weights, config.data.directory)
    assert paths == (str(home), f"{home}/w", f"{home}/d")
    assert jaxdp.load_config("~/recipe.py").data.directory == f"{home}/images"


def test_only_a_home_directory_is_expanded(home):
    kept = ["", "-", "a/~", "./~", "~nobody-of-this-name/x", "~backup.png", "s3://bucket/~", "/~/x"]
    assert [expand_user(path, "F") for path in kept] == kept
    assert expand_user("~", "F") == str(home)
    assert expand_user("~root/x", "F") == f"{pwd.getpwnam('root').pw_dir}/x"


def test_without_a_home_directory_there_is_no_cache_and_copies_need_a_directory(homeless):
    assert cache_directory() is None
    with pytest.raises(ConfigError, match=r"storage.directory='auto': the home directory .* --storage.directory"):
        local_directory(Storage())
    with pytest.raises(ConfigError, match="--workdir='~/x': the home directory of this user is unknown; set HOME"):
        expand_user("~/x", "--workdir")


def test_run_without_a_home_directory_trains(homeless, tiny, tmp_path):
    assert train_shown(tiny, tmp_path / "run", screen=Screen(quiet=True)).steps > 0


def test_a_run_is_a_directory_with_a_config(tmp_path):
    assert not is_run(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert not is_run(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_text("{}")
    assert is_run(str(tmp_path)) is is_run(tmp_path) is True


def test_urls_are_those_of_a_protocol_and_a_slash():
    assert [url for url in ("s3://b", "file:/x", " gs://b", "simplecache::s3://b", "A+b.c-1:/x") if not is_url(url)] == []
    assert [path for path in ("x", "", "a:b", "/s3://b", "C:\\x", "1s://b", "runs/a:/b", Path("s3")) if is_url(path)] == []


@pytest.mark.parametrize(
    ("limits", "count", "expected"),
    [
        ((1024, 4096), 512, None),
        ((1024, 4096), 513, (1025, 4096)),
        ((1024, 1500), 1024, (1500, 1500)),
        ((1024, resource.RLIM_INFINITY), 10**6, (10**6 + 512, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10**6, None),
    ],
)
def test_limit_of_open_files_is_raised_as_far_as_it_can_be_and_never_lowered(limits, count, expected, monkeypatch):
    changes = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: changes.append(pair))
    allow_open_files(count)
    assert changes == ([] if expected is None else [expected])


def test_output_that_cannot_be_written_goes_nowhere_and_is_named(tmp_path, monkeypatch):
    """Of stdout and stderr alone; beside them, nothing is opened or stays open."""
    opened, calls = len(os.listdir("/proc/self/fd")), []
    monkeypatch.setattr(os, "dup2", lambda null, number: calls.append((os.fstat(null).st_rdev, number)))
    for number, name in ((1, "stdout"), (2, "stderr"), (7, "mine")):
        stream = types.SimpleNamespace(name="mine", fileno=lambda number=number: number, flush=lambda: calls.append("flushed"))
        line = f"{name} cannot be written (Broken pipe); the run continues without it"
        assert discard_output(stream, BrokenPipeError(32, "Broken pipe")) == line
    null = os.stat(os.devnull).st_rdev
    assert calls == [(null, 1), "flushed", (null, 2), "flushed"]
    assert len(os.listdir("/proc/self/fd")) == opened
    line = "output cannot be written (full); the run continues without it"
    assert discard_output(io.StringIO(), OSError("full")) == line
