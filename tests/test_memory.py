"""Freed memory that stays with the process: as the kernel counts page faults."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, threading
from jaxdp.parallel import memory

print(memory.keep_freed())
if not hasattr(ctypes.CDLL(None), "mallopt"):
    raise SystemExit
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


def faults(**environment) -> tuple[bool, int]:
    there = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    ran = subprocess.run([sys.executable, "-c", FAULTS], env=there | environment, capture_output=True, text=True, check=True)
    kept, *count = ran.stdout.split()
    if not count:
        pytest.skip("not glibc")
    return kept == "True", int(count[0])


def test_memory_that_was_freed_is_used_again_without_the_kernel():
    kept, count = faults()
    assert kept
    assert count < 2 * ONCE  # of 20 times as many


@pytest.mark.parametrize("there", [{"JAXDP_KEEP_MEMORY": "off"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_it_is_left_as_it_is_where_someone_says_so(there):
    kept, count = faults(**there)
    assert not kept
    assert count > 5 * ONCE
