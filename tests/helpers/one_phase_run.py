"""The tiny run with one batch size, for tests of whole processes without a change of phase: one program less to compile."""

import dataclasses
import sys
from pathlib import Path

from jaxdp.config import Config, Phase

sys.path.insert(0, str(Path(__file__).parent))
import tiny_run


def config() -> Config:
    return dataclasses.replace(tiny_run.config(), batch=(Phase(16, per_worker_batch=2),))
