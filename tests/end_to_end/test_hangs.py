"""Whole processes that hang: reported with their stack traces, and ended with the same reason on every process."""

import re
import sys

import pytest
from helpers.processes import ROOT, TIMEOUT, place, popen

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
        if os.environ["JAX_PROCESS_ID"] == "1" and index == 40:
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


def test_a_data_source_that_sleeps_during_the_start_is_reported_and_ends_the_run(tmp_path, free_port):
    """Small images are decoded before the first step."""
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "run")]
    running = [popen(command, place(rank, 2, free_port) | {"PYTHONPATH": str(ROOT)}) for rank in range(2)]
    for process in running:
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 1, err
        assert re.search(r"no progress for \d+ s: .*while loading", err), err
        reason = r"stuck: no progress for \d+ s; .*run.py:\d+ in __getitem__"
        assert re.search(rf"jaxdp: rank 1 on \S+ failed while loading, [^:]*: {reason}", err), err
