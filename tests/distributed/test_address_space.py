import os
import resource
import subprocess
import sys

import pytest

from jaxdp.cli import main
from jaxdp.distributed import address_space
from jaxdp.errors import ConfigError

MIB = 2**20


@pytest.fixture
def set_limits(monkeypatch):
    """set_limits(mib, cores): the limits of this process, as the module reads them."""

    def set_to(mib, cores):
        limits = {resource.RLIMIT_AS: mib * MIB if mib else resource.RLIM_INFINITY, resource.RLIMIT_NPROC: 7}
        monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
        monkeypatch.setattr(address_space.ctypes, "CDLL", lambda name: None)  # mallopt would change this process

    return set_to


@pytest.mark.parametrize(("mib", "cores"), [(None, 64), (1000, 1), (1152, 2), (1536, 64)])
def test_check_with_a_limit_that_suffices_passes(set_limits, mib, cores):
    set_limits(mib, cores)
    address_space.check()


@pytest.mark.parametrize(("mib", "cores"), [(896, 1), (1024, 2), (1024, 64), (256, 1)])
def test_check_with_a_limit_that_is_too_low_raises(set_limits, mib, cores):
    set_limits(mib, cores)
    with pytest.raises(ConfigError) as error:
        address_space.check()
    assert (error.value.field, error.value.value) == ("ulimit -v", mib * 1024)
    assert f"on {cores} cores" in error.value.reason


def test_train_with_half_a_gigabyte_of_address_space_exits_with_2_and_one_line():
    """Without the check it hung, aborted or printed tracebacks, depending on where the address space ran out."""
    command = f"ulimit -v 524288; exec {sys.executable} -m jaxdp train"
    completed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False)
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert completed.stderr.startswith("jaxdp: ulimit -v=524288: the libraries need at least ")
    assert completed.stderr.count("\n") == 1


def test_report_with_too_little_address_space_is_refused_unless_it_only_reads(set_limits, tmp_path, capsys):
    set_limits(1024, 2)
    for flags, message in (([], "ulimit -v=1048576"), (["--no-html"], f"{tmp_path}")):
        with pytest.raises(SystemExit) as exit_:
            main.main(["report", str(tmp_path), *flags])
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("std::bad_alloc"), RuntimeError("can't start new thread")])
def test_out_of_memory_or_threads_exits_with_1_and_one_line_with_the_limits(set_limits, capsys, monkeypatch, error):
    set_limits(2048, 2)

    def fails(arguments):
        raise error

    monkeypatch.setattr(main, "_main", fails)
    with pytest.raises(SystemExit) as exit_:
        main.main([])
    assert exit_.value.code == 1
    reason = str(error) or "out of memory"
    expected = f"jaxdp: {reason}; limits: address space 2,147,483,648 bytes (ulimit -v), 7 threads (ulimit -u)\n"
    assert capsys.readouterr().err == expected
