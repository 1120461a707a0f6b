"""Parameters in and out of registered models: files, trees given to `train`, and `load_params`, compared with Flax."""

import dataclasses
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from helpers.flax_nets import BUILDERS, LinenNet, NnxNet
from helpers.processes import ROOT, launch, wait_for_exit
from helpers.runs import Interrupted, Recorder, outcome, train_shown, train_until
from safetensors.numpy import load_file, save_file

import jaxdp
from jaxdp import ConfigError, train
from jaxdp.config import Checkpoint, Finetune, Model, Optimizer, Phase
from jaxdp.data.datasets import pixel_stats
from jaxdp.inference.export import export
from jaxdp.session import train as story
from jaxdp.setup.run_dir import run_config
from jaxdp.training import loop

HEAD, NORM = "params/net/head/Dense_0/", "batch_stats/net/blocks_0/BatchNorm_0/"  # of linen


def flax_tensors(kind, classes=6):
    """Tensors of a module that Flax alone has initialized, with the names of an exported file."""
    if kind.startswith("linen"):
        init = jax.jit(lambda key: LinenNet(classes).init(key, jnp.zeros((1, 16, 16, 3)), train=False))
        trees = init(jax.random.key(7))
    else:
        module = NnxNet(classes, rngs=nnx.Rngs(7))
        trees = {"params": nnx.to_pure_dict(nnx.state(module, nnx.Param))}
        trees["batch_stats"] = nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))
    named = {
        f"{tree}/net/{'/'.join(map(str, path))}": np.array(leaf)
        for tree in trees
        for path, leaf in traverse_util.flatten_dict(trees[tree]).items()
    }
    return {name: leaf + np.float32(0.5) * name.endswith(("/mean", "/var")) for name, leaf in named.items()}


def with_net(config, kind, **finetuned):
    jaxdp.register_model(kind, BUILDERS[kind])
    return dataclasses.replace(config, model=Model(name=kind, classes=6), finetune=Finetune(**finetuned))


def set_variables(module, variables):
    """As docs/weights.md says."""
    page = (Path(__file__).parents[2] / "docs/weights.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "set_variables" in block)
    names = {"nnx": nnx}
    exec(block, names)
    names["set_variables"](module, variables)


def saved(run, *_):
    """Save the state before the first step."""
    loop.save_now(run)
    run.checkpoints.wait()
    raise Interrupted


def same(found, expected):
    return {name for name, tensor in expected.items() if name in found and np.array_equal(found[name], tensor)}


def test_tensors_that_the_model_or_the_file_lacks_are_listed_and_a_classifier_for_other_classes_is_new(tiny, tmp_path, start):
    """Values in float16 and float64 are converted."""
    kind = "linen_stages"
    tensors = flax_tensors(kind, classes=9)
    absent = next(name for name in tensors if name.endswith("/scale"))
    del tensors[absent]
    kernel = next(name for name in tensors if name.endswith("kernel") and "blocks" in name)
    tensors[kernel] = tensors[kernel].astype(np.float16)
    stored = tensors | {"params/net/tail/kernel": np.ones((2, 2)), "optimizer/count": np.ones(1, np.int64)}
    save_file(stored, tmp_path / "w.safetensors")
    config = with_net(tiny, kind, weights=str(tmp_path / "w.safetensors"))
    found, line = start(config)
    new = {absent, f"{HEAD}kernel", f"{HEAD}bias"}
    assert same(found, {name: tensor.astype(np.float32) for name, tensor in tensors.items()}) == found.keys() - new
    seed, _ = start(with_net(tiny, kind))
    assert new <= same(found, seed)
    assert line.endswith(
        f" ({len(found) - 3} of the model's {len(found)} tensors; rounded from float64 to float32; neither params "
        f"nor batch_stats, so left out: 'optimizer/count'; new for 6 classes: '{HEAD}bias', '{HEAD}kernel'; not given, so "
        f"from the seed: {absent!r}; not in the model, so left out: 'params/net/tail/kernel')"
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{HEAD}kernel": np.ones((5, 6), np.float32)}, rf"{HEAD}kernel has shape \(5, 6\), but in the model"),
        ({f"{NORM}var": np.full(5, -1, np.float32)}, f"{NORM}var has a negative variance"),
        ({"params/net/x": np.ones(3, np.float32)}, "no tensor has a name of the model's: there is 'params"),
    ],
)
def test_unusable_file_is_refused_in_one_line_before_the_run_has_a_directory(tiny, tmp_path, tensors, message):
    save_file(tensors, tmp_path / "w.safetensors")
    config = with_net(tiny, "linen", weights=str(tmp_path / "w.safetensors"))
    with pytest.raises(ConfigError, match=f"^finetune.weights='.*w.safetensors': {message}") as caught:
        train(config, tmp_path / "run")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_loaded_parameters_work_in_flax_and_start_a_run(tiny, tmp_path, monkeypatch, start):
    """Reference: probabilities of `predict` and tensors of `export`, of a checkpoint before the first step."""
    kind = "nnx_stages"
    tensors = flax_tensors(kind)
    save_file(tensors, tmp_path / "w.safetensors")
    config = with_net(tiny, kind, weights=str(tmp_path / "w.safetensors"))

    with monkeypatch.context() as patched:
        patched.setattr(story, "train_phase", saved)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "run")
    variables = jaxdp.load_params(tmp_path / "run" / "checkpoints" / "0")
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    mean, std = (np.float32(stat) for stat in pixel_stats(config))
    pixels = (images.astype(np.float32) - mean) / std
    module = NnxNet(6, rngs=nnx.Rngs(0))
    set_variables(module, variables)
    module.eval()
    logits = nnx.jit(lambda module, pixels: module(pixels))(module, pixels)
    predicted = jaxdp.predict(tmp_path / "run", images, top=6)
    ours = np.take_along_axis(np.asarray(jax.nn.softmax(logits)), predicted.classes, axis=1)
    np.testing.assert_allclose(ours, predicted.probabilities, rtol=1e-5)

    export(tmp_path / "run", tmp_path / "exported.safetensors")
    found, line = start(with_net(tiny, kind), initial_params=variables)
    assert same(found, load_file(tmp_path / "exported.safetensors")) == found.keys() == tensors.keys()
    assert line == f"starting from initial_params ({len(tensors)} of the model's {len(tensors)} tensors)"


@pytest.mark.slow
def test_run_from_given_parameters_resumes_exactly_with_them_and_without(tiny, tmp_path):
    """Averaged parameters are used in evaluations; without averaging, the last trained ones."""
    config = dataclasses.replace(tiny, optimizer=Optimizer(name="sgd", average_decay=0.5), epochs=1.2, batch=(Phase(8),))
    config = dataclasses.replace(config, checkpoint=Checkpoint(every_epochs=0.32))
    train(dataclasses.replace(config, seed=5), tmp_path / "first")
    averaged, last = (jaxdp.load_params(tmp_path / "first", averaged=averaged) for averaged in (True, False))
    assert not np.array_equal(averaged["params"]["kernel"], last["params"]["kernel"])
    by_samples = jaxdp.load_params(tmp_path / "first", "newest")
    assert jax.tree.all(jax.tree.map(np.array_equal, averaged, by_samples))

    train(config, tmp_path / "whole", initial_params=averaged)
    assert outcome(tmp_path / "whole")[3] != outcome(tmp_path / "first")[3]
    digest = run_config(tmp_path / "whole").finetune.digest
    train_until(config, tmp_path / "cut", step=5, initial_params=averaged)
    screen = Recorder()
    train_shown(config, tmp_path / "cut", screen=screen)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    assert any(text.endswith(f"keeps its digest {digest}") for text in screen.lines)

    train(config, tmp_path / "whole", initial_params=averaged)
    with pytest.raises(ConfigError, match=r"it holds a different run \(finetune.digest: "):
        train(config, tmp_path / "whole", initial_params=last)
    shutil.rmtree(tmp_path / "cut" / "checkpoints")
    with pytest.raises(
        ConfigError, match="initial_params: not given, and the run has no checkpoint to resume from; give it again"
    ):
        train(dataclasses.replace(config, epochs=2.0), tmp_path / "cut", accept_changes=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kernel": np.ones(3)}, "initial_params: a mapping with 'kernel' is not a tree of "),
        ({"params": {"kernel": np.ones((2, 6))}}, r"initial_params: params/net/kernel has shape \(2, 6\), but"),
    ],
)
def test_unusable_initial_params_are_refused_before_the_run_has_a_directory(tiny, tmp_path, given, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        train(tiny, tmp_path / "run", initial_params=given)
    assert not (tmp_path / "run").exists()


OF_TWO_PROCESSES = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import jax, numpy as np, jaxdp
from jax.sharding import NamedSharding, PartitionSpec
from jaxdp.models.finetune import from_tree

jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], 2, int(os.environ["JAX_PROCESS_ID"]))
mesh, kernel = jax.make_mesh((2,), ("processes",)), np.ones((8, 6), np.float32)
for spec in (PartitionSpec(), PartitionSpec("processes")):
    array = jax.make_array_from_callback(kernel.shape, NamedSharding(mesh, spec), lambda index: kernel[index])
    try:
        given = from_tree(jaxdp.load_config("digits"), {{"params": {{"kernel": array}}}})
        assert np.array_equal(given.tensors["params/kernel"], kernel)
    except jaxdp.ConfigError as error:
        assert spec != PartitionSpec()
        print("refused:", error, flush=True)
"""


@pytest.mark.slow
def test_initial_params_on_devices_of_several_processes_are_refused_unless_each_has_them_whole(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(OF_TWO_PROCESSES)
    out, _ = wait_for_exit(launch(2, tmp_path, command=[str(program)]))
    assert out.count("refused: initial_params: params/kernel is on devices of several processes; give whole arrays") == 2
