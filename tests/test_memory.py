"""Freed memory that stays with the process: as the kernel counts page faults."""

import os
import platform
import subprocess
import sys

import pytest

from jaxdp.bench import provenance

pytestmark = [
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone can be told"),
    pytest.mark.skipif(provenance.huge_pages() == "always", reason="large pages everywhere: too few faults to be counted"),
]
SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")
STEPS = """
import resource, statistics, sys
from jaxdp.config import Mesh
from jaxdp.parallel import distributed

distributed.start(Mesh(keep_memory=sys.argv[1] == "kept"))
import jax, jax.numpy as jnp

@jax.jit
def step(x):  # with 48 MB that are there only while it runs
    return (x @ x.T) @ x

x = jnp.ones((3548, 8))
each = []
for _ in range(15):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    each.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(statistics.median(each[5:]))  # once every thread has what it needs; a block may still move once
"""
PAGES = 48 * 2**20 // 4096


def faults(memory: str) -> float:
    """Page faults of the median step."""
    there = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    line = [sys.executable, "-c", STEPS, memory]
    return float(subprocess.run(line, env=there, capture_output=True, text=True, check=True).stdout)


def test_a_steps_memory_is_used_again_without_the_kernel():
    assert faults("kept") < PAGES / 5
    assert faults("given back") > PAGES / 2  # that is what it saves
