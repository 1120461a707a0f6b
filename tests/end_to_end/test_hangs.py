"""Whole processes that hang: reported with their stack traces, and ended with the same reason on every process."""

import os
import re
import subprocess
import sys

import pytest
from helpers.processes import ROOT, TIMEOUT, place

pytestmark = pytest.mark.slow
SCRIPT = """
import os, sys, time
import numpy as np
import jaxdp
from jaxdp.distributed import supervisor
from jaxdp.config import Config, Data, Guard, Logging, Model, Optimizer, Phase

class Images:
    classes = 10
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if os.environ.get("JAX_PROCESS_ID", "0") == sys.argv[2] and index == 40:
            time.sleep(10_000)
        return np.full((16, 16, 3), index, np.uint8), index % 10

config = Config(
    name="stuck", epochs=9.0, data=Data(source="given", image_size=16, augmentation="none"), batch=(Phase(8),),
    model=Model(depth=18, width=2, stem="small"), optimizer=Optimizer(name="sgd"), logging=Logging(tensorboard=False),
    guard=Guard(step_minutes=0.3),
)
supervisor.LATE_SECONDS = 4.0
jaxdp.train(config, sys.argv[1], datasets=(Images(), Images()))
"""


@pytest.mark.parametrize(("processes", "rank"), [(1, 0), (2, 1)])
def test_a_data_source_that_sleeps_during_the_start_is_reported_and_ends_the_run(tmp_path, free_port, processes, rank):
    """Small images are decoded before the first step."""
    (tmp_path / "run.py").write_text(SCRIPT)
    running = []
    for number in range(processes):
        variables = place(number, processes, free_port) if processes > 1 else {}
        command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "run"), str(rank)]
        environment = os.environ | variables | {"PYTHONPATH": str(ROOT)}
        running.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    failed = rf"rank {rank} on \S+ failed" if processes > 1 else "failed"
    for process in running:
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 1, err
        assert re.search(r"no progress for \d+ s: .*while loading", err), err
        reason = r"stuck: no progress for \d+ s; .*run.py:\d+ in __getitem__"
        assert re.search(rf"jaxdp: {failed} while loading, [^:]*: {reason}", err), err
