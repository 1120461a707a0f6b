"""Flags of `jaxdp doctor`."""

import pytest

from jaxdp.cli import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--verify", "--workdir", "a"], "--workdir='a': has no effect with --verify in a single process"),
        (["--verify", "--check-images"], "--check-images: has no effect with --verify"),
        (["--output", "a"], "--output='a': requires --verify"),
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
