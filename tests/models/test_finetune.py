"""Fine-tuning: the initial weights, frozen parts, messages, learning rate of the classifier, and resuming."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from helpers.runs import Recorder, outcome, train_shown, train_until
from helpers.step import BATCH, PIXELS, assert_close, distributed_gradients, initial_params, make_batch, step_config, with_parts
from helpers.torch_layout import write_tiny_weights
from jax import lax
from parallel.test_overlap import is_convolution, walk
from safetensors.numpy import load_file, save_file

import jaxdp
from jaxdp import ConfigError, models, train
from jaxdp.analysis.wire import step_traffic
from jaxdp.cli import main
from jaxdp.config import Finetune, Mesh, Optimizer, Phase
from jaxdp.data.augment import normalize
from jaxdp.inference.load_run import load_run
from jaxdp.losses import cross_entropy
from jaxdp.models import weights
from jaxdp.models.torch_weights import to_torch_layout, torch_name
from jaxdp.models.weights import named_tensors
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import make_plan
from jaxdp.setup.run_dir import run_config
from jaxdp.sizes import model_summary
from jaxdp.training.step_compiler import trace_train_step
from jaxdp.validation import to_json


def finetuned(config, **changes):
    return dataclasses.replace(config, finetune=Finetune(**changes))


def short(config):
    """One phase of two epochs, with momentum and averaged weights."""
    optimizer = Optimizer(name="sgd", momentum=0.9, average_decay=0.5)
    schedule = dataclasses.replace(config.schedule, learning_rate=0.1, warmup_epochs=0.5)
    config = dataclasses.replace(config, epochs=2.0, batch=(Phase(global_batch=16),), optimizer=optimizer, schedule=schedule)
    return dataclasses.replace(config, mesh=Mesh(cpu_devices=2))


@pytest.mark.parametrize("classes", [6, 9])
def test_first_step_starts_from_the_weights_of_the_file(tiny_resnet, tmp_path, start, classes):
    """The classifier is initialized from the seed if it has other classes."""
    file, tensors = write_tiny_weights(tmp_path / "w.safetensors", classes)
    (random, _), (initial, line) = start(tiny_resnet), start(finetuned(tiny_resnet, weights=file))
    assert {torch_name(name) for name in initial} == tensors.keys()
    for name, value in initial.items():
        expected = to_torch_layout(random[name]) if classes != 6 and "fc_" in name else tensors[torch_name(name)]
        np.testing.assert_array_equal(to_torch_layout(value), expected, err_msg=name)
    assert f"{classes} classes" in line
    assert ("new for 6 classes: 'params/fc_bias', 'params/fc_kernel'" in line) == (classes != 6)


@pytest.mark.parametrize(
    "head", [{}, {"fc.0.weight": (8, 8), "fc.2.bias": (4,)}, {"fc.weight": (6, 32)}], ids=["none", "moco", "linear"]
)
@pytest.mark.parametrize("naming", ["torchvision", "jaxdp"])
def test_a_backbone_without_classifier_gets_a_new_one(tiny_resnet, tmp_path, start, head, naming):
    """As of MoCo and DINO, and of timm's models with num_classes=0."""
    file, tensors = write_tiny_weights(tmp_path / "w.safetensors")
    (random, _), backbone = start(tiny_resnet), {name: value for name, value in tensors.items() if not name.startswith("fc.")}
    if naming == "jaxdp":
        main.main(["import", str(file), "--output", str(tmp_path / "own.safetensors")])
        stored = {name: value for name, value in load_file(tmp_path / "own.safetensors").items() if "fc_" not in name}
    else:
        stored = backbone | {name: np.zeros(shape, np.float32) for name, shape in head.items()}
    save_file(stored, file)
    initial, line = start(finetuned(tiny_resnet, weights=file))
    for name, value in initial.items():
        expected = to_torch_layout(random[name]) if "fc_" in name else backbone[torch_name(name)]
        np.testing.assert_array_equal(to_torch_layout(value), expected, err_msg=name)
    assert "not given, so from the seed: 'params/fc_bias', 'params/fc_kernel'" in line
    assert "no classifier" in line
    assert all(repr(name) in line for name in head) or naming == "jaxdp"
    with pytest.raises(ConfigError, match=r"no classifier bias 'fc.bias' of shape .*; only fine-tuning takes others"):
        weights.read(file)


def test_finetuned_run_keeps_frozen_parts_and_resumes_exactly(tiny_resnet, tmp_path):
    file, tensors = write_tiny_weights(tmp_path / "w.safetensors", classes=9)
    config = finetuned(short(tiny_resnet), weights=file, frozen_stages=2)
    train(config, tmp_path / "whole")
    train_until(config, tmp_path / "cut", step=3)
    train(config, tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")

    saved = json.loads((tmp_path / "whole" / "config.json").read_text())["finetune"]
    assert (saved["weights"], len(saved["digest"])) == (file, 16)
    state = load_run(tmp_path / "whole")[0]
    assert set(state.average.params) == {"layer2_0", "fc_kernel", "fc_bias"}
    for trees in ((state.params, state.batch_stats), state.eval_variables):
        for name, value in named_tensors(*trees).items():
            theirs = tensors[torch_name(name)]
            same = np.array_equal(to_torch_layout(np.asarray(value)), theirs)
            frozen = torch_name(name).startswith(("conv1.", "bn1.", "layer1."))
            assert same == frozen, name

    write_tiny_weights(file, classes=9, seed=2)
    with pytest.raises(ConfigError, match=r"it holds a different run \(finetune.digest: "):
        train(config, tmp_path / "whole")
    digest = json.loads((tmp_path / "whole" / "config.json").read_text())["finetune"]["digest"]
    with pytest.raises(ConfigError, match=f"finetune.digest is '{digest}'; use the file of that digest"):
        train(finetuned(config, weights=file, frozen_stages=2, digest=digest), tmp_path / "whole")


def test_frozen_parts_of_given_parameters_stay_as_given_and_resume_without_them(tiny_resnet, tmp_path):
    """Configured by flags, which do not know the parameters."""
    saved = tmp_path / "config.json"
    saved.write_text(to_json(short(tiny_resnet)))
    config = jaxdp.load_config(saved, ["--finetune.frozen-stages", "2"])
    model = models.create(config.model)
    params, batch_stats = jax.jit(lambda: model.init(jax.random.key(5), (16, 16, 3)))()
    given = {"params": params, "batch_stats": batch_stats}
    train_until(config, tmp_path / "run", step=5, initial_params=given)
    train(config, tmp_path / "run")
    trained = jaxdp.load_params(tmp_path / "run", averaged=False)["params"]
    same = {name: jax.tree.all(jax.tree.map(np.array_equal, trained[name], given["params"][name])) for name in trained}
    assert same == {"conv1": True, "bn1": True, "layer1_0": True, "layer2_0": False, "fc_kernel": False, "fc_bias": False}


@pytest.mark.slow
def test_resume_without_the_weights_file_succeeds(tiny_resnet, tmp_path):
    """Resumed, finished, and elsewhere by --resume PATH; a new run and a renamed file raise."""
    file, _ = write_tiny_weights(tmp_path / "w.safetensors")
    config, run = finetuned(short(tiny_resnet), weights=file), tmp_path / "run"
    train_until(config, run, step=5)
    digest = run_config(run).finetune.digest
    (tmp_path / "w.safetensors").rename(tmp_path / "away")

    for resume, workdir in (("auto", run), ("auto", run), (str(run), tmp_path / "elsewhere")):
        screen = Recorder()
        assert train_shown(config, workdir, resume=resume, screen=screen).steps == 7
        (line,) = [text for text in screen.lines if "no longer exists" in text]
        assert line == f"{file} no longer exists; the run does not need it to resume, and keeps its digest {digest}"
        assert run_config(workdir).finetune.digest == digest
    for changed, resume in ((config, "never"), (finetuned(config, weights=file + "x"), "auto")):
        with pytest.raises(ConfigError, match=r"finetune.weights=.*: file not found"):
            train(changed, run, resume=resume)
    assert not (tmp_path / "run-2").exists()

    result = (run / "result.json").read_text()
    shutil.rmtree(run / "checkpoints")
    longer = dataclasses.replace(config, epochs=3.0)
    with pytest.raises(ConfigError, match="file not found, and the run has no checkpoint to resume from"):
        train(longer, run, accept_changes=True)
    assert (run / "result.json").read_text() == result

    write_tiny_weights(file, seed=2)
    with pytest.raises(ConfigError, match=r"it holds a different run \(finetune.digest: "):
        train(config, run)


@pytest.mark.parametrize(("frozen_stages", "accumulation"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_gradient_with_frozen_parts_equals_the_gradient_of_the_trained_parts(frozen_stages, accumulation):
    """Reference: one worker at a time on one device, frozen parts constant and in evaluation mode."""
    config = with_parts(
        step_config(), finetune={"weights": "any", "frozen_stages": frozen_stages}, data={"augmentation": "none"}
    )
    model, workers = models.create(config.model), 8 * accumulation
    size = BATCH // workers
    params, stats = initial_params(config)
    frozen, trained = model.split_frozen(frozen_stages)
    gradient, report = distributed_gradients(config, (2, 4), accumulation)

    def loss_of(params, rows):
        x = normalize(rows["images"], *PIXELS)
        for part in model.segments:
            own = {name: params[name] for name in part}
            own = lax.stop_gradient(own) if part in frozen else own
            x, _ = model.apply_segment(own, stats, x, segment=part, train=part in trained)
        return cross_entropy(x, rows["labels"], 0.1).mean()

    of_worker = jax.jit(jax.value_and_grad(loss_of))
    rows = [{name: all_[i : i + size] for name, all_ in make_batch().items()} for i in range(0, BATCH, size)]
    everywhere = [of_worker(params, part) for part in rows]
    loss, expected = jax.tree.map(lambda *x: np.mean(np.stack(x).astype(np.float64), axis=0), *everywhere)
    assert set(gradient) == {name for part in trained for name in part}
    assert_close(gradient, {name: expected[name] for name in gradient}, 1e-4)
    assert float(report["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert set(report["moments"]) == {name for name in gradient if name in stats}


@pytest.mark.parametrize("frozen_stages", [2, 5])
@pytest.mark.usefixtures("direct_convolutions")
def test_frozen_parts_have_no_backward_pass_and_send_nothing(tiny_resnet, frozen_stages):
    config = with_parts(tiny_resnet, finetune={"weights": "any", "frozen_stages": frozen_stages}, reduce={"strategy": "psum"})
    model, phase = models.create(config.model), make_plan(config, examples=50, devices=4).phases[0]
    summary = model_summary(config)
    sent = sum(collective.operand_bytes * collective.count for collective in step_traffic(config, phase).collectives)
    assert sent == summary["gradient_bytes"] + summary["statistics_bytes"]
    params, stats = jax.eval_shape(lambda: model.init(jax.random.key(0), (16, 16, 3)))
    trained = jax.tree.leaves(model.trainable(params, frozen_stages))
    assert summary["gradient_bytes"] == sum(summary["messages"][:-1]) == 4 * sum(leaf.size for leaf in trained)
    statistics = sum(leaf.size for leaf in jax.tree.leaves(model.trainable(stats, frozen_stages)))
    assert summary["statistics_bytes"] == 4 * statistics + 16  # loss, accuracy, requests to save and to stop
    assert summary["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params))

    traced = trace_train_step(config, model, phase, mesh=make_mesh(phase.vertical, phase.horizontal))
    (mapped,) = [eqn for eqn in walk(traced.jaxpr.eqns) if eqn.primitive.name == "shard_map"]
    count = sum(is_convolution(eqn) for eqn in mapped.params["jaxpr"].eqns)
    forward = 7  # the stem; two and two of a block with its projection in the second stage; the classifier
    backward = {2: 2 * 4 - 1, 5: 1}[frozen_stages]  # of weights and of images; one of the first part's images, which XLA drops
    assert count == forward + backward


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({"frozen_stages": 1}, {}, "finetune.frozen_stages=1: requires finetune.weights"),
        ({"digest": "0123456789abcdef"}, {}, "finetune.digest='0123456789abcdef': it is of parameters that are not given"),
        ({"weights": "{file}"}, {"width": 8}, "it has the width 4, but model.width is 8; use --model.width 4"),
        ({"weights": "{file}"}, {"classifier_bias": "class_frequency"}, "model.classifier_bias='class_frequency': not used"),
    ],
)
def test_train_with_invalid_finetuning_raises_before_the_run_has_a_directory(tiny_resnet, tmp_path, changes, model, message):
    file, _ = write_tiny_weights(tmp_path / "w")
    changes = {name: file if value == "{file}" else value for name, value in changes.items()}
    config = with_parts(tiny_resnet, finetune=changes, model=model)
    with pytest.raises(ConfigError, match=message):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
