"""Freed memory that stays with the process: as the kernel counts page faults."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, threading
from jaxdp.parallel import memory

memory.keep_if_asked()
def again():
    for _ in range(20):
        for size in (2**26, 2**24):
            bytes_there = bytearray(size)  # written to, page by page
            del bytes_there
thread = threading.Thread(target=again)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread.start(), thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
ONCE = (2**26 + 2**24) // 4096


def faults(**environment) -> int:
    there = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    ran = subprocess.run([sys.executable, "-c", FAULTS], env=there | environment, capture_output=True, text=True, check=True)
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone can be told")
def test_memory_that_was_freed_is_used_again_without_the_kernel():
    assert faults(JAXDP_KEEP_MEMORY="on") < 2 * ONCE  # of 20 times as many
    assert faults() > 5 * ONCE
