import os
import subprocess
import sys

import pytest

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
    with pytest.raises(ConfigError, match=r"its classes.json is not a list of at most 3 names"):
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
