"""Flags of `jaxdp doctor`."""

import json

import pytest

from jaxdp.cli import main
from jaxdp.doctor import jax_probe


def test_doctor_with_launcher_flags_checks_that_launcher(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax_probe, "probe", lambda *_: jax_probe.Probe())
    main.main(["doctor", "--json", "--coordinator", "127.0.0.1:29411", "--processes", "2", "--rank", "0"])
    messages = {check["check"]: check["message"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert messages["launcher"].startswith("flags: rank 0 of 2, rank 0 at 127.0.0.1:29411")
    with pytest.raises(SystemExit):
        main.main(["doctor", "--json", "--cluster", "slurm"])
    launcher = json.loads(capsys.readouterr().out)["checks"][-1]
    assert (launcher["check"], launcher["status"]) == ("launcher", "error")
    assert "--cluster" in launcher["message"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--verify", "--workdir", "a"], "--workdir='a': has no effect with --verify in a single process"),
        (["--verify", "--images-per-second", "9"], "--images-per-second=9.0: has no effect with --verify"),
        (["--verify", "--check-images"], "--check-images: has no effect with --verify"),
        (["--output", "a"], "--output='a': requires --verify"),
        (["--images-per-second", "-1"], "--images-per-second=-1.0: must be greater than 0"),
        (["--verify", "--output", "FOLDER"], "--output"),
        (["--verify", "--output", ""], "--output"),
        (["--verify", "--output", "FILE"], "--overwrite"),
        (["--verify", "--output", "FILE/a.json"], "--output"),
    ],
)
def test_doctor_with_unusable_flags_exits_with_2_before_any_work(capsys, tmp_path, flags, message):
    file = tmp_path / "proofs.json"
    file.write_text("kept")
    with pytest.raises(SystemExit) as stopped:
        main.main(["doctor", *(flag.replace("FOLDER", str(tmp_path)).replace("FILE", str(file)) for flag in flags)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert file.read_text() == "kept"
