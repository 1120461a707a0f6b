"""A recipe file with its own loss, schedule and callbacks: two processes of two devices, one of them killed, and resumed."""

import os
import re
import signal

import pytest
from helpers.processes import ROOT, TIMEOUT, launch, outcome, pids_of, wait_for_exit, wait_for_lines

from jaxdp.records import read_log

RECIPE = f"""
import dataclasses, functools, sys
import jax, numpy as np, jaxdp
from PIL import Image
sys.path.insert(0, {str(ROOT / "tests/helpers")!r})
import tiny_run

def brier(logits, targets, weights):
    return ((jax.nn.softmax(logits) - targets) ** 2 * weights).sum(-1)

def config():
    jaxdp.register_schedule("mine", lambda epoch: 0.002 / (1 + epoch))
    jaxdp.register_loss("brier", functools.partial(brier, weights=np.arange(1.0, 11.0)))
    base = tiny_run.config()
    optimizer = dataclasses.replace(base.optimizer, loss="brier")
    return dataclasses.replace(base, optimizer=optimizer, schedule=jaxdp.config.Schedule(name="mine"))

def callbacks():
    return [PerClass(), WorstMistakes(), GradientNorms()]
"""
PAGE = (ROOT / "docs/extending.md").read_text()
CALLBACKS = re.findall(r"```python\n(class (?:PerClass|WorstMistakes|GradientNorms)\(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_own_loss_schedule_and_callbacks_on_two_processes_survive_a_kill(tmp_path):
    recipe, flags = tmp_path / "mine.py", ["--mesh.cpu-devices", "2", "--epochs", "8", "--reduce.update", "sharded"]
    recipe.write_text("\n".join([RECIPE, *CALLBACKS]))

    def start(workdir):
        return launch(2, workdir, command=["train.py", "--workdir", str(workdir), "--config", str(recipe), *flags])

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    wait_for_exit(start(whole))
    process = start(killed)
    wait_for_lines(killed, 20, process)
    os.kill(pids_of(process, 2)[1], signal.SIGKILL)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    wait_for_exit(start(killed))
    assert outcome(killed) == outcome(whole)
    log = read_log(killed / "metrics.jsonl")
    rates = {(line["samples"] - line["global_batch"]) / 64: line["learning_rate"] for line in log if "loss" in line}
    assert rates == {epoch: 0.002 / (1 + epoch) for epoch in rates}
    assert all("recall_9" in line for line in log if "eval_loss" in line)
    assert any("gradient_norm/" in name for line in log for name in line)
    assert (killed / "worst.png").exists()
