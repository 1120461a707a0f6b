"""Flags of `jaxdp doctor`."""

import pytest

from jaxdp.cli import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--verify", "--workdir", "a"], "--workdir='a': has no effect with --verify in a single process"),
        (["--verify", "--check-images"], "--check-images: has no effect with --verify"),
        (["--thorough"], "--thorough: requires --verify"),
        (["--processes", "2"], "--coordinator: flags of several processes require --verify"),
    ],
)
def test_doctor_with_unusable_flags_exits_with_2_before_any_work(capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        main.main(["doctor", *flags])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
