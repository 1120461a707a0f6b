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
import resource, sys
from jaxdp.config import Mesh
from jaxdp.parallel import distributed

distributed.start(Mesh(keep_memory=sys.argv[1] == "kept"))
import jax, jax.numpy as jnp

@jax.jit
def step(x):  # with 48 MB that are there only while it runs
    for _ in range(3):
        x = jnp.sort(x, axis=-1) @ x
    return x[0, 0]

x = jnp.ones((2048, 2048))
for _ in range(5):  # until every thread has what it needs
    step(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 5 * 48 * 2**20 // 4096


def faults(memory: str) -> int:
    there = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    line = [sys.executable, "-c", STEPS, memory]
    return int(subprocess.run(line, env=there, capture_output=True, text=True, check=True).stdout)


def test_a_steps_memory_is_used_again_without_the_kernel():
    assert faults("kept") < PAGES / 5
    assert faults("given back") > PAGES / 2  # that is what it saves
