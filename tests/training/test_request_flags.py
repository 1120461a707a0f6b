"""Requests of the processes in a step and in an evaluation step: the maximum of all, no further collective, equal results."""

from collections import Counter

import jax
import numpy as np
import pytest
from helpers.step import BATCH, PIXELS, compiled_step, hyperparameters, linear_config, make_batch

from jaxdp import models
from jaxdp.data import prefetch
from jaxdp.distributed import process_group
from jaxdp.parallel.mesh import AXES, make_mesh
from jaxdp.parallel.traffic import find_collectives
from jaxdp.training import request_flags
from jaxdp.training.evaluation import make_evaluation_step
from jaxdp.training.request_flags import BATCH_KEY, NONE, SAVE, STOP
from jaxdp.training.state import create_state
from jaxdp.xla.hlo import read_schedule

SHAPE = (2, 4)


def requested(by_device: dict[int, int]) -> np.ndarray:
    values = np.full(8, NONE, np.int32)
    values[list(by_device)] = list(by_device.values())
    return values


def training(config, by_device=None):
    """(step, arguments) on eight devices; without requests for None."""
    mesh = make_mesh(*SHAPE)
    batch = make_batch() | ({} if by_device is None else {BATCH_KEY: requested(by_device)})
    state = create_state(config, models.create(config.model), mesh)
    return compiled_step(config, SHAPE), (state, prefetch.to_global(batch, mesh), hyperparameters(0.3))


def evaluation(config, by_device=None):
    mesh, model = make_mesh(*SHAPE), models.create(config.model)
    batch = make_batch() | {name: np.ones(BATCH, np.int32) for name in ("seen", "weights")}
    batch |= {} if by_device is None else {BATCH_KEY: requested(by_device)}
    state = create_state(config, model, mesh)
    step = make_evaluation_step(config, model, mesh, pixel_stats=PIXELS)
    return step, (state.params, state.batch_stats, prefetch.to_global(batch, mesh))


@pytest.mark.parametrize("make", [training, evaluation])
@pytest.mark.parametrize(
    "by_device",
    [
        {},
        {3: STOP, 0: SAVE},
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({0: SAVE}, {7: STOP}, dict.fromkeys(range(8), SAVE))),
    ],
    ids=str,
)
def test_the_largest_request_of_any_device_reaches_all(normalized_linear, make, by_device):
    step, arguments = make(linear_config(), by_device)
    results = step(*arguments)[1 if make is training else 0]
    shards = [int(shard.data) for shard in results["request"].addressable_shards]
    assert shards == [requested(by_device).max()] * 8


def collectives_of(step, arguments):
    """(executions of each operation in the traced step, those in the compiled one, bytes of the operands in the traced one)."""
    traced = step.trace(*arguments)
    found = find_collectives(traced.jaxpr, dict(zip(AXES, SHAPE, strict=True)))
    in_trace, in_program = Counter[str](), Counter[str]()
    for collective in found:
        in_trace[collective.operation] += collective.count
    for compiled in read_schedule(traced.lower().compile().as_text(), 8).collectives:
        in_program[compiled.operation] += compiled.count
    return in_trace, in_program, sum(collective.operand_bytes * collective.count for collective in found)


@pytest.mark.parametrize(
    ("make", "strategy"), [(training, "torus"), pytest.param(training, "ring", marks=pytest.mark.slow), (evaluation, "torus")]
)
def test_requests_add_no_collective(normalized_linear, make, strategy):
    """They are two more float32 values of a message that every step sends."""
    config = linear_config(strategy=strategy)
    *counts, sent = collectives_of(*make(config, {}))
    *counts_before, sent_before = collectives_of(*make(config))
    assert counts == counts_before
    assert all(counts)
    assert 0 < sent - sent_before <= 8 * sum(counts[0].values())


@pytest.mark.parametrize(
    ("make", "strategy"), [(training, "torus"), pytest.param(training, "psum", marks=pytest.mark.slow), (evaluation, "torus")]
)
def test_requests_change_no_bit(normalized_linear, make, strategy):
    """Except with ring, whose order of additions depends on the length of the message."""
    config = linear_config(strategy=strategy)
    results, before = (step(*arguments) for step, arguments in (make(config, {2: SAVE}), make(config)))
    del results[1 if make is training else 0]["request"]
    jax.tree.map(np.testing.assert_array_equal, results, before)


def test_numbers_of_requests_are_those_of_the_process_group():
    assert (NONE, SAVE, STOP) == (process_group.NONE, process_group.SAVE, process_group.STOP)


def test_a_batch_s_requests_have_one_number_for_each_device():
    """In the sharding of the rows of a batch, and as programs are compiled for them."""
    mesh = make_mesh(*SHAPE)
    for request, found in ((STOP, request_flags.on_devices(STOP, mesh)), (NONE, request_flags.none(mesh)[BATCH_KEY])):
        np.testing.assert_array_equal(found, np.full(8, request))
        assert found.sharding == prefetch.batch_sharding(mesh)
        expected = request_flags.abstract(mesh)
        assert (found.shape, found.dtype, found.sharding) == (expected.shape, expected.dtype, expected.sharding)
    assert request_flags.on_devices(STOP, mesh) is request_flags.on_devices(STOP, mesh)
