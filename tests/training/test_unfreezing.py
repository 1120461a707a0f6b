"""`finetune.unfreeze_epoch`: frozen stages that train from a step on."""

import dataclasses
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from helpers.runs import outcome, train_until
from helpers.torch_layout import write_tiny_weights
from optim.test_groups import EXPECTED, nested, parameters, torch_adamw, torch_sgd
from parallel.test_overlap import is_convolution, walk

import jaxdp
from jaxdp import ConfigError, models, train
from jaxdp.config import Checkpoint, Config, Finetune, Mesh, Optimizer, Phase, Reduce, unfrozen
from jaxdp.optim.optimizer import StateInParts
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import make_plan
from jaxdp.recipes import scale_schedule
from jaxdp.training.state import make_optimizer
from jaxdp.training.step_compiler import trace_train_step

BOUNDARY = 64  # of 50 images in batches of 16: the first step at or past one epoch
FROZEN = ("conv1", "bn1", "layer1_0")


@pytest.fixture
def config(tiny_resnet, tmp_path):
    """Seven steps, the first four with a frozen stem and stage; every checkpoint is kept."""
    file, _ = write_tiny_weights(tmp_path / "w.safetensors")
    return dataclasses.replace(
        tiny_resnet,
        epochs=2.0,
        batch=(Phase(global_batch=16),),
        optimizer=Optimizer(name="adamw", average_decay=0.5, weight_decay=0.1),
        schedule=dataclasses.replace(tiny_resnet.schedule, learning_rate=0.01, warmup_epochs=0.5),
        finetune=Finetune(weights=file, frozen_stages=2, unfreeze_epoch=1.0),
        checkpoint=Checkpoint(every_epochs=0.32, keep=100),
        mesh=Mesh(cpu_devices=2),
    )


def whole(config, folder):
    """A run, and {samples: (parameters, statistics) of its checkpoint}."""
    train(config, folder)
    names = sorted(int(path.name) for path in (folder / "checkpoints").iterdir())
    loaded = {samples: jaxdp.load_params(folder, str(samples), averaged=False) for samples in names}
    return {samples: (each["params"], each["batch_stats"]) for samples, each in loaded.items()}


def same(first, second):
    return jax.tree.all(jax.tree.map(np.array_equal, first, second))


@pytest.mark.parametrize("update", ["replicated", pytest.param("sharded", marks=pytest.mark.slow)])
def test_stages_are_bitwise_frozen_before_the_boundary_and_resume_is_exact_around_it(config, tmp_path, update):
    config = dataclasses.replace(config, reduce=Reduce(update=update))
    states = whole(config, tmp_path / "whole")
    assert [*states] == [16, 32, 48, 64, 80, 96, 112]
    for tree in (0, 1):
        frozen = {samples: {name: state[tree].get(name) for name in FROZEN} for samples, state in states.items()}
        assert [same(frozen[16], frozen[samples]) for samples in states] == [samples <= BOUNDARY for samples in states]
        assert not any(same(frozen[80][name], frozen[16][name]) for name in FROZEN if frozen[16][name])
    averaged = jaxdp.load_params(tmp_path / "whole")["params"]["conv1"]["kernel"]
    trained = [states[samples][0]["conv1"]["kernel"].astype(np.float64) for samples in states]
    weights = np.array([0.5**age for age in reversed(range(7))])
    np.testing.assert_allclose(averaged, np.tensordot(weights / weights.sum(), trained, 1), rtol=1e-5, atol=1e-7)
    for kept in (48, 64, 80):  # killed after the save of these samples
        cut = shutil.copytree(tmp_path / "whole", tmp_path / str(kept))
        (cut / "result.json").unlink()
        for path in (cut / "checkpoints").iterdir():
            if int(path.name) > kept:
                shutil.rmtree(path)
        train(config, cut)
        assert outcome(cut) == outcome(tmp_path / "whole")


def test_a_sharded_update_equals_a_replicated_one_across_the_boundary(config, tmp_path):
    config = dataclasses.replace(config, optimizer=Optimizer(name="lamb", clip_norm=1.0))
    results = [
        whole(dataclasses.replace(config, reduce=Reduce(update=name)), tmp_path / name)[112]
        for name in ("replicated", "sharded")
    ]
    jax.tree.map(lambda ours, expected: np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-5), *results)


def test_the_step_before_is_that_of_frozen_stages_and_the_step_after_has_all_gradients(config):
    model, mesh = models.create(config.model), make_mesh(1, 2)

    def trace(finetune, index):
        changed = dataclasses.replace(config, finetune=finetune)
        phase = make_plan(changed, examples=50, devices=2).phases[index]
        return trace_train_step(changed, model, phase, mesh=mesh).jaxpr

    def convolutions(jaxpr):
        (mapped,) = [eqn for eqn in walk(jaxpr.eqns) if eqn.primitive.name == "shard_map"]
        return sum(is_convolution(eqn) for eqn in walk(mapped.params["jaxpr"].eqns))

    plain = dataclasses.replace(config.finetune, unfreeze_epoch=None)
    assert str(trace(config.finetune, 0)) == str(trace(plain, 0))
    assert convolutions(trace(config.finetune, 1)) == convolutions(trace(Finetune(), 0)) > convolutions(trace(plain, 0))


@pytest.mark.parametrize(("name", "reference"), [("sgd", torch_sgd), ("adamw", torch_adamw)])
def test_steps_after_the_boundary_equal_those_of_torch(name, reference):
    """In float64; torch.optim keeps no state for a parameter without a gradient, and counts its steps from its first one."""
    network = SimpleNamespace(segments=(("body",), ("head",)), split_frozen=lambda stages: ((("body",),), (("head",),)))
    random, frozen = np.random.default_rng(1), Config(optimizer=Optimizer(name=name, weight_decay=0.1))
    frozen = dataclasses.replace(frozen, finetune=Finetune(frozen_stages=1, unfreeze_epoch=1.0))
    weights, states = parameters(random), {path: {} for path in EXPECTED}
    rules = [make_optimizer(config, network, learning_rate=0.01, momentum=0.9) for config in (frozen, unfrozen(frozen))]
    ours = nested(weights)
    state = rules[0].init({"head": ours["head"]})
    for step in range(12):
        if step == 5:
            state = StateInParts(state, rules[1].init(ours).later)
        gradients, part = parameters(random), ours if step >= 5 else {"head": ours["head"]}
        for path in weights:
            if path[0] in part:
                own = step - 5 if path[0] == "body" else step
                factors = {"rate": 0.01, "decay": 0.1 * (path[1] == "kernel"), "step": own}
                states[path], weights[path] = reference(states[path], weights[path], gradients[path], **factors)
        gradient = {key: tree for key, tree in nested(gradients).items() if key in part}
        updates, state = rules[step >= 5].update(gradient, state, part)
        ours = ours | optax.apply_updates(part, updates)
    for (part, leaf), expected in weights.items():
        np.testing.assert_allclose(ours[part][leaf], expected, rtol=2e-5, atol=2e-6, err_msg=f"{part}/{leaf}")


@pytest.mark.parametrize(
    ("epoch", "batches", "expected"),
    [
        (1.0, [(16, None)], [(0, 0, False), (0, 64, True)]),  # 50 is within the fourth step
        (0.96, [(16, None)], [(0, 0, False), (0, 48, True)]),  # exactly at the end of a step
        (0.5, [(8, 1.0), (16, None)], [(0, 0, False), (0, 32, True), (1, 56, True)]),
        (1.0, [(8, 1.0), (16, None)], [(0, 0, False), (1, 56, True)]),  # the end of a phase
        (1.2, [(8, 1.0), (16, None)], [(0, 0, False), (1, 56, False), (1, 72, True)]),
    ],
)
def test_the_boundary_divides_a_phase_at_the_first_step_at_or_past_it(epoch, batches, expected):
    """50 images, 2 epochs: (index, first sample, unfrozen) of each part."""
    phases = tuple(Phase(global_batch=batch, until_epoch=end) for batch, end in batches)
    config = Config(epochs=2.0, batch=phases, finetune=Finetune(frozen_stages=1, unfreeze_epoch=epoch))
    config = dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, warmup_epochs=0.0))
    plan = make_plan(config, examples=50, devices=1)
    assert [(phase.index, phase.first_sample, phase.unfrozen) for phase in plan.phases] == expected
    assert [phase.end for phase in plan.phases[:-1]] == [phase.first_sample for phase in plan.phases[1:]]
    assert plan.total_samples >= 100


def test_a_boundary_without_a_step_after_it_or_without_frozen_stages_is_refused(config):
    late = dataclasses.replace(config, finetune=dataclasses.replace(config.finetune, unfreeze_epoch=1.95))
    with pytest.raises(
        ConfigError, match=r"unfreeze_epoch=1.95: no step begins at or after it: the last one begins at epoch 1.92"
    ):
        make_plan(late, examples=50, devices=1)
    with pytest.raises(ConfigError, match=r"unfreeze_epoch=1.0: nothing is frozen; use --finetune.frozen-stages"):
        jaxdp.load_config("digits", ["--finetune.unfreeze-epoch", "1"])


def test_a_frozen_run_continues_unfrozen_but_not_the_reverse(config, tmp_path):
    plain = dataclasses.replace(config, finetune=dataclasses.replace(config.finetune, unfreeze_epoch=None))
    train_until(plain, tmp_path / "run", step=6)
    train(config, tmp_path / "run", accept_changes=True)
    with pytest.raises(
        ConfigError, match=r"unfreeze_epoch=None: the stages of the checkpoint at epoch 2.24 are unfrozen already"
    ):
        train(dataclasses.replace(plain, epochs=3.0), tmp_path / "run", accept_changes=True)


def test_another_number_of_epochs_scales_the_boundary(config):
    assert scale_schedule(config, ["--epochs", "6"]).finetune.unfreeze_epoch == 3.0
    assert scale_schedule(config, ["--epochs", "6", "--finetune.unfreeze-epoch", "2"]).finetune.unfreeze_epoch == 1.0
