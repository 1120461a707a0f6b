"""The programs of a plan and their arguments, without compiling them."""

import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.step import with_parts
from jax.sharding import PartitionSpec

from jaxdp import models
from jaxdp.config import Phase
from jaxdp.parallel.mesh import AXES
from jaxdp.planning import make_plan
from jaxdp.training.step_compiler import StepCompiler, abstract_arguments


@pytest.fixture
def compiler_of(tiny):
    """A compiler of the tiny recipe, by changes of its phases and arguments."""
    made = []

    def make(config=tiny, *, examples=23, **arguments):
        plan = make_plan(config, examples=50, devices=4)
        made.append(StepCompiler(plan, None, pixel_stats=(0.0, 1.0), evaluation_examples=examples, **arguments))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


@pytest.mark.parametrize("examples", [1, 3, 8, 9, 23, 24, 37, 1000])
@pytest.mark.parametrize("phases", [(8, 16), (4, 12, 8), (12,)], ids=str)
@pytest.mark.parametrize("fitting", [None, 11], ids=["enough memory", "memory of 11 images"])
def test_evaluation_batches_are_the_fewest_that_fit_spread_evenly(tiny, compiler_of, monkeypatch, examples, phases, fitting):
    """In at most the rows of the largest training step on the mesh, and in host memory, where three batches are at once."""
    if fitting:
        monkeypatch.setattr("jaxdp.training.step_compiler.AHEAD_BYTES", 3 * (tiny.data.image_size**2 * 3 * 4) * 3 - 1)
    until = [1.0, 2.0, None][-len(phases) :]
    config = replace(tiny, batch=tuple(Phase(batch, end) for batch, end in zip(phases, until, strict=True)))
    compiler = compiler_of(config, examples=examples)
    for phase in compiler.plan.phases:
        on_mesh = [each.global_batch for each in compiler.plan.phases if each.shape == phase.shape]
        assert all(each.accumulation == 1 for each in compiler.plan.phases)
        most = min(max(on_mesh), 8) if fitting else max(on_mesh)  # 3 * 3 * 4 images less a byte: 2 for each device
        images, rows = compiler.evaluation_rows(phase)
        batches = next(count for count in range(1, examples + 1) if count * most >= examples)
        assert images == next(each for each in range(1, examples + 1) if each * batches >= examples)
        assert rows == next(each for each in range(images, images + 4) if each % phase.devices == 0)


def test_evaluation_batch_has_at_least_one_image(compiler_of, monkeypatch):
    monkeypatch.setattr("jaxdp.training.step_compiler.AHEAD_BYTES", 0)
    compiler = compiler_of(examples=5)
    assert compiler.evaluation_rows(compiler.plan.phases[0]) == (1, 4)


def test_strategy_is_shown_as_it_is_on_the_mesh(tiny, compiler_of):
    (phase, *_) = compiler_of().plan.phases
    for reduce, shown in (({"strategy": "ring"}, "ring"), ({"update": "sharded"}, "torus, sharded update")):
        compiler = compiler_of(with_parts(tiny, reduce={"strategy": "torus"} | reduce))
        assert compiler.shown_strategy(phase) == shown
        assert compiler.shown_strategy(replace(phase, vertical=1, horizontal=1)) == "none"


def test_phases_of_one_shape_share_mesh_placement_and_programs(compiler_of):
    """The second request of a program is the first one's future; another batch, accumulation or size is another program."""
    compiler, calls = compiler_of(), []
    first, second = compiler.plan.phases
    assert compiler.mesh(first) is compiler.mesh(second)
    assert compiler.layout(first) is compiler.layout(second)
    assert dict(compiler.mesh(first).shape) == dict(zip(AXES, first.shape, strict=True))
    keys = {compiler.key(phase) for phase in (first, replace(first, first_sample=5, momentum=0.1))}
    assert len(keys) == 1
    for changes in ({"global_batch": 4}, {"accumulation": 2}, {"image_size": 99}, {"vertical": 1, "horizontal": 2}):
        local = {"local_devices": 2} if "vertical" in changes else {}
        keys.add(compiler.key(replace(first, **changes, **local)))
    assert len(keys) == 5

    def compile_it(*arguments):
        calls.append((threading.current_thread().name, arguments))
        return len(calls)

    futures = [compiler.once(key, compile_it, key, 7) for key in (("a",), ("b",), ("a",))]
    assert [future.result(60) for future in futures] == [1, 2, 1]
    assert futures[0] is futures[2]
    assert [(name.rpartition("_")[0], arguments) for name, arguments in calls] == [
        ("compile", (("a",), 7)),
        ("compile", (("b",), 7)),
    ]


def test_close_cancels_what_has_not_started(compiler_of):
    compiler, running, go = compiler_of(), threading.Event(), threading.Event()
    first = compiler.once(("first",), lambda: (running.set(), go.wait(60)))
    second = compiler.once(("second",), lambda: None)
    assert running.wait(60)
    compiler.close()  # at once: the first one still waits
    assert (first.done(), second.cancelled()) == (False, True)
    go.set()
    first.result(60)


@pytest.mark.parametrize("stored_size", [None, 20])
@pytest.mark.parametrize("resident", [False, True])
def test_arguments_of_a_step_have_the_rows_and_the_size_of_its_images(tiny, compiler_of, stored_size, *, resident):
    compiler = compiler_of()
    phase, config = compiler.plan.phases[1], with_parts(tiny, data={"stored_size": stored_size})
    images = jax.ShapeDtypeStruct((50, 9, 9, 3), jnp.uint8) if resident else None
    mesh = compiler.mesh(phase)
    _, batch, scalars, *more = abstract_arguments(config, models.create(config.model), phase, mesh=mesh, images=images)
    size = stored_size or tiny.data.image_size
    own = {"indices": ((16,), "int32")} if resident else {"images": ((16, size, size, 3), "uint8")}
    columns = {"labels": ((16,), "int32"), "positions": ((16,), "uint32")} | own
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()} == columns
    assert {leaf.sharding.spec for leaf in batch.values()} == {PartitionSpec(AXES)}
    assert {name: str(leaf.dtype) for name, leaf in scalars.items()} == {
        "seed": "uint32",
        "learning_rate": "float32",
        "momentum": "float32",
    }
    assert [(leaf.shape, leaf.dtype) for leaf in more] == [((50, 9, 9, 3), "uint8")] * resident
    assert all(leaf.sharding.is_fully_replicated for leaf in [*scalars.values(), *more])


def test_hyperparameters_are_transferred_once_per_mesh_but_for_the_rate(tiny, compiler_of):
    compiler = compiler_of(replace(tiny, seed=5))
    first, again = (compiler.hyperparameters(compiler.plan.phases[0], rate) for rate in (0.1, 0.2))
    assert {name: (np.asarray(value).dtype.name, np.asarray(value).item()) for name, value in first.items()} == {
        "seed": ("uint32", 5),
        "momentum": ("float32", np.float32(compiler.plan.phases[0].momentum)),
        "learning_rate": ("float32", np.float32(0.1)),
    }
    assert (again["seed"] is first["seed"], again["learning_rate"]) == (True, np.float32(0.2))
    devices = {*compiler.mesh(compiler.plan.phases[0]).devices.flat}
    assert first["seed"].sharding.device_set == first["momentum"].sharding.device_set == devices
