"""Tests of jaxdp.distributed.abort."""

import signal
import subprocess
import sys
import time

import pytest

ABORT = """
import ctypes, faulthandler, os, threading, time
from jaxdp.distributed.abort import delay_abort
{before}
threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()
time.sleep({seconds})
print("reported", flush=True)
os._exit(3)
"""


def abort(before: str, seconds: float) -> subprocess.CompletedProcess:
    script = ABORT.format(before=before, seconds=seconds)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def test_another_thread_reports_before_an_abort():
    completed = abort("delay_abort()", 0.5)
    assert (completed.returncode, completed.stdout) == (3, "reported\n")


def test_abort_without_a_delay_ends_the_process_at_once():
    assert abort("", 30).returncode == -signal.SIGABRT


@pytest.mark.slow
def test_an_abort_that_no_thread_reports_ends_the_process():
    began = time.monotonic()
    assert abort("delay_abort()", 60).returncode == -signal.SIGABRT
    assert 6 <= time.monotonic() - began < 60


def test_handler_of_faulthandler_stays():
    completed = abort("faulthandler.enable(); delay_abort()", 30)
    assert completed.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in completed.stderr
