import os
import platform
import resource
import subprocess
import sys

import pytest

from jaxdp.bench import environment
from jaxdp.cli import main


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("std::bad_alloc"), RuntimeError("can't start new thread")])
def test_out_of_memory_or_threads_exits_with_1_and_one_line_with_the_limits(capsys, monkeypatch, error):
    limits = {resource.RLIMIT_AS: 2**31, resource.RLIMIT_NPROC: 7}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))

    def fails(arguments):
        raise error

    monkeypatch.setattr(main, "_with_help_last", fails)
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
