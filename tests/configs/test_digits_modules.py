"""The recipes that train Flax modules on the digits: killed, resumed, exported and predicted from, on the command line."""

import json
import math
import runpy
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from helpers.processes import CACHE_EVERYTHING
from PIL import Image
from safetensors.numpy import load_file

from jaxdp.data.digits import digits
from jaxdp.recipes import find_config


def command(name, *arguments):
    return [sys.executable, "-m", "jaxdp", name, *map(str, arguments)]


@pytest.fixture(autouse=True)
def programs_are_kept(monkeypatch):
    """A process takes the compiled programs of those before it."""
    for name, value in CACHE_EVERYTHING.items():
        monkeypatch.setenv(name, value)


def answer_of(name, *arguments):
    return json.loads(subprocess.run(command(name, *arguments, "--json"), capture_output=True, text=True, check=True).stdout)


def last_record(run):
    """The last evaluation in the log, without times."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next({key: record[key] for key in ("samples", "eval_loss")} for record in reversed(records) if "eval_loss" in record)


def test_block_of_the_convnext_is_that_of_the_paper():
    """On one pixel, of which a convolution sees the center: layer norm, perceptron with the erf form of GELU, layer scale."""
    block = runpy.run_path(str(find_config("digits_convnext")))["Block"](4)
    x = np.linspace(-2, 2, 12).reshape(3, 1, 1, 4)
    params = block.init(jax.random.key(0), x, train=False)["params"]
    params = jax.tree.map(lambda p: np.random.default_rng(p.size).normal(size=p.shape), params)
    convolution, expand, reduce = params["Conv_0"], params["Dense_0"], params["Dense_1"]
    y = x * convolution["kernel"][1, 1, 0] + convolution["bias"]
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
    y = y * params["LayerNorm_0"]["scale"] + params["LayerNorm_0"]["bias"]
    y = y @ expand["kernel"] + expand["bias"]
    y = y * (1 + np.vectorize(math.erf)(y / math.sqrt(2))) / 2
    expected = x + (y @ reduce["kernel"] + reduce["bias"]) * params["layer_scale"]
    np.testing.assert_allclose(block.apply({"params": params}, x, train=False), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_short_run_of_a_recipe_survives_kill_9_and_is_exported_and_predicted_from(tmp_path):
    """Whole runs of both recipes, killed and resumed, with their accuracy: notebook 05."""
    recipe = "digits_vit"
    train = command("train", "--config", recipe, "--epochs", "3", "--workdir", tmp_path / "killed")
    running = subprocess.Popen(train, stdout=subprocess.DEVNULL)
    while not list((tmp_path / "killed").glob("checkpoints/*/manifest.json")):
        assert running.poll() is None
        time.sleep(0.1)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    resumed = subprocess.run(train, check=True, capture_output=True, text=True)
    assert "resuming from" in resumed.stdout
    subprocess.run([*train[:-1], str(tmp_path / "whole")], check=True, stdout=subprocess.DEVNULL)
    assert last_record(tmp_path / "killed") == last_record(tmp_path / "whole")

    run = ["--workdir", tmp_path / "killed", "--config", recipe]
    answer_of("export", *run, "--output", tmp_path / "w.safetensors")
    assert all(name.startswith("params/net/") for name in load_file(tmp_path / "w.safetensors"))
    images, labels = digits(image_size=16)["test"]
    files = [tmp_path / f"{number}.png" for number in range(len(images))]
    for file, image in zip(files, images, strict=True):
        Image.fromarray(image).save(file)
    found = [row["top"][0]["class"] for row in answer_of("predict", *run, *files)["predictions"]]
    assert np.mean(np.array(found) == labels) == pytest.approx(answer_of("evaluate", *run)["eval_accuracy"], abs=1e-6)


@pytest.mark.slow
def test_two_processes_train_a_module_with_dropout_as_one_does(tmp_path):
    flags = ["--config", "digits_convnext", "--epochs", "2", "--mesh.vertical", "2", "--mesh.horizontal", "1"]
    one = command("train", *flags, "--mesh.cpu-devices", "2", "--workdir", tmp_path / "one")
    two = ["jaxdp", "train", *flags, "--mesh.cpu-devices", "1", "--workdir", tmp_path / "two"]
    two = command("launch", "--processes", 2, "--", *two)
    for one_command in (one, two):
        subprocess.run(one_command, check=True, stdout=subprocess.DEVNULL)
    first, second = last_record(tmp_path / "one"), last_record(tmp_path / "two")
    assert first["samples"] == second["samples"]
    assert first["eval_loss"] == pytest.approx(second["eval_loss"], rel=1e-3)
