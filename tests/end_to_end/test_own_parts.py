"""A recipe file with its own loss, schedule and callbacks: two processes of two devices, one of them killed, and resumed."""

import json
import os
import re
import signal

import pytest
from helpers.processes import ROOT, TIMEOUT, launch, outcome, pids_of, wait_for_exit, wait_for_lines

from jaxdp.run_records import read_log

RECIPE = f"""
import dataclasses, functools, sys
import jax, numpy as np, jaxdp
from PIL import Image
sys.path.insert(0, {str(ROOT / "tests/helpers")!r})
import one_phase_run

def brier(logits, targets, weights):
    return ((jax.nn.softmax(logits) - targets) ** 2 * weights).sum(-1)

def config():
    jaxdp.register_schedule("mine", lambda epoch: 0.002 / (1 + epoch))
    jaxdp.register_loss("brier", functools.partial(brier, weights=np.arange(1.0, 11.0)))
    base = one_phase_run.config()
    optimizer = dataclasses.replace(base.optimizer, loss="brier")
    return dataclasses.replace(base, optimizer=optimizer, schedule=jaxdp.config.Schedule(name="mine"))

def callbacks():
    return [PerClass(), WorstMistakes(), GradientNorms()]
"""
PAGE = (ROOT / "docs/extending.md").read_text()
CALLBACKS = re.findall(r"```python\n(class (?:PerClass|WorstMistakes|GradientNorms)\(.*?)```", PAGE, re.DOTALL)


# The second evaluation is the last that improves, the fifth one equals it: the seventh one ends the run.
STOP = ["--stop.metric", "eval_top5", "--stop.patience", "5", "--evaluation.every-epochs", "0.75"]
# A row of the mesh spans both processes.
FLAGS = [*STOP, "--epochs", "8", "--mesh.cpu-devices", "2", "--mesh.vertical", "1", "--reduce.update", "sharded"]
FLAGS += ["--optimizer.average-decay", "0.9", "--optimizer.average-start", "warmup"]


@pytest.mark.slow
def test_own_parts_and_early_stopping_with_a_sharded_update_on_two_processes_survive_a_kill_bitwise(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("\n".join([RECIPE, *CALLBACKS]))

    def start(workdir):
        return launch(2, workdir, command=["train.py", "--workdir", str(workdir), "--config", str(recipe), *FLAGS])

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    wait_for_exit(start(whole))
    process = start(killed)
    wait_for_lines(killed, 6, process)
    os.kill(pids_of(process, 2)[1], signal.SIGKILL)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    wait_for_exit(start(killed))
    assert outcome(killed) == outcome(whole)
    log = read_log(killed / "metrics.jsonl")
    rates = {(line["samples"] - line["global_batch"]) / 64: line["learning_rate"] for line in log if "loss" in line}
    assert rates == {epoch: 0.002 / (1 + epoch) for epoch in rates}
    evaluations = [line for line in log if "eval_loss" in line]
    assert all("recall_9" in line for line in evaluations)
    assert any("gradient_norm/" in name for line in log for name in line)
    assert (killed / "worst.png").exists()
    result = json.loads((killed / "result.json").read_text())
    assert (result["samples"], result["stopped_early"]) == (336, True)
    assert [line["samples"] for line in evaluations] == [*range(48, 337, 48)]
    best = max(evaluations, key=lambda line: (line["eval_top5"], line["samples"]))
    assert (result["best_samples"], result["loss"]) == (best["samples"], best["eval_loss"])
    assert (killed / f"checkpoints/{best['samples']}/manifest.json").exists()
