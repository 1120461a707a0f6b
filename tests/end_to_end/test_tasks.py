"""Several labels, and a registered task with two heads, on one and two processes: stopped by KILL and TERM, and resumed."""

import os
import signal

import pytest
from helpers.processes import ROOT, TIMEOUT, launch, outcome, pids_of, wait_for_exit, wait_for_lines

RECIPE = f"""
import dataclasses, sys
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np, jaxdp
sys.path.insert(0, {str(ROOT / "tests/helpers")!r})
import one_phase_run

class TwoHeads(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x.reshape(len(x), -1)))
        return {{"kind": nn.Dense(3)(x), "size": nn.Dense(1)(x)[:, 0]}}

def loss(outputs, targets, images, constants):
    kind = -jnp.take_along_axis(jax.nn.log_softmax(outputs["kind"]), targets["kind"][:, None], axis=-1)[:, 0]
    return kind + constants * (outputs["size"] - targets["size"] + images.mean((1, 2, 3))) ** 2

def farthest(outputs, targets):
    return np.abs(outputs["size"] - targets["size"]).max()

def data(section):
    random = np.random.default_rng(0)
    def made(count):
        kind, size = random.integers(0, 3, count), random.random(count)
        images = (random.integers(0, 80, (count, 8, 8, 3)) + 50 * kind[:, None, None, None]).astype(np.uint8)
        several = np.stack([kind == 0, kind != 1, size > 0.5], 1)
        return images, several if section.image_size == 8 and TASK == "labels" else {{"kind": kind, "size": size}}
    return made(64), made(37)

def config():
    base = one_phase_run.config()
    jaxdp.register_dataset("made", data)
    jaxdp.register_model("two_heads", TwoHeads())
    farthest_of_all = jaxdp.Metric(farthest, higher_is_better=False, of="all")
    targets = {{"kind": np.int32(0), "size": np.float32(0)}}
    jaxdp.register_task("heads", jaxdp.Task(loss=loss, targets=targets, metrics={{"farthest": farthest_of_all}}, constants=0.5))
    source = jaxdp.config.Data(source="made", image_size=8, augmentation="digits")
    net = jaxdp.config.Model(name="tiny" if TASK == "labels" else "two_heads")
    loss_name = "binary" if TASK == "labels" else "softmax"
    optimizer = dataclasses.replace(base.optimizer, label_smoothing=0.0, loss=loss_name)
    return dataclasses.replace(base, task=TASK, data=source, model=net, optimizer=optimizer)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("task", ["labels", "heads"])
def test_run_that_is_stopped_and_resumed_equals_an_undisturbed_one(task, processes, stop, tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(f"TASK = {task!r}\n{RECIPE}")

    def start(workdir):
        flags = ["--mesh.cpu-devices", str(4 // processes), "--epochs", "12", "--evaluation.every-epochs", "2"]
        return launch(processes, workdir, command=["train.py", "--workdir", str(workdir), "--config", str(recipe), *flags])

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    wait_for_exit(start(whole))
    process = start(stopped)
    wait_for_lines(stopped, 9, process)
    os.kill(pids_of(process, processes)[-1], stop)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    wait_for_exit(start(stopped))
    assert outcome(stopped) == outcome(whole)
