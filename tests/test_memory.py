"""Freed memory that stays with the process: as the kernel counts page faults."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone can be told")
SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")
STEPS = """
import resource, sys
from jaxdp.config import Compile, Mesh
from jaxdp.parallel import compilation, distributed

devices = distributed.start(Mesh(cpu_devices=int(sys.argv[1]), keep_memory=sys.argv[2] == "kept"))
import jax, jax.numpy as jnp

def step(x):  # with 48 MB on each device that are there only while it runs
    for _ in range(3):
        x = jnp.sort(x, axis=-1) @ x
    return x[:, 0, 0]

rows = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, "d"), jax.sharding.PartitionSpec("d"))
x = jax.device_put(jnp.ones((len(devices), 2048, 2048)), rows)
step = compilation.compiled(jax.jit(step).trace(x), Compile(), "cpu")
for _ in range(5):  # until every thread has what it needs
    step(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 5 * 48 * 2**20 // 4096


def faults(devices: int, memory: str) -> int:
    there = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    line = [sys.executable, "-c", STEPS, str(devices), memory]
    return int(subprocess.run(line, env=there, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_steps_memory_is_used_again_without_the_kernel(devices):
    assert faults(devices, "kept") < devices * PAGES / 5
    assert faults(devices, "given back") > devices * PAGES / 2  # that is what it saves
