import os
import platform
import resource
import subprocess
import sys

import pytest

from jaxdp.bench import environment
from jaxdp.cli import main
from jaxdp.distributed import memory
from jaxdp.errors import ConfigError

MIB = 2**20


@pytest.fixture
def set_limits(monkeypatch):
    """set_limits(mib, cores): the limits of this process, as the module reads them."""

    def set_to(mib, cores):
        limits = {resource.RLIMIT_AS: mib * MIB if mib else resource.RLIM_INFINITY, resource.RLIMIT_NPROC: 7}
        monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
        monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: None)  # mallopt would change this process

    return set_to


@pytest.mark.parametrize(("mib", "cores"), [(None, 64), (1000, 1), (1152, 2), (1536, 64)])
def test_check_with_a_limit_that_suffices_passes(set_limits, mib, cores):
    set_limits(mib, cores)
    memory.check_address_space()


@pytest.mark.parametrize(("mib", "cores"), [(896, 1), (1024, 2), (1024, 64), (256, 1)])
def test_check_with_a_limit_that_is_too_low_raises(set_limits, mib, cores):
    set_limits(mib, cores)
    with pytest.raises(ConfigError) as error:
        memory.check_address_space()
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


SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")
STEPS = """
import resource, statistics, sys
from jaxdp.config import Mesh
from jaxdp.distributed import runtime

if sys.argv[1] == "kept":
    runtime.start(Mesh())
import jax, jax.numpy as jnp

@jax.jit
def step(x):  # allocates 48 MB while it runs
    return (x @ x.T) @ x

x = jnp.ones((3548, 8))
each = []
for _ in range(15):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    each.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(statistics.median(each[5:]))  # after every thread has allocated its arena
"""
PAGES = 48 * 2**20 // 4096


def page_faults(memory: str) -> float:
    """Page faults of the median step, as the kernel counts them."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    command = [sys.executable, "-c", STEPS, memory]
    return float(subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc has this option")
@pytest.mark.skipif(environment.huge_pages() == "always", reason="large pages everywhere: too few page faults to count")
def test_keep_freed_reuses_the_memory_of_a_step_without_page_faults():
    assert page_faults("kept") < PAGES / 5
    assert page_faults("returned") > PAGES / 2
