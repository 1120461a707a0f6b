"""The compiled step of the benchmarks."""

import dataclasses

from jaxdp.bench import step_runner
from jaxdp.config import Phase
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import make_mesh
from jaxdp.xla.hlo import read_schedule


def with_batch(config, batch, per_worker=None, **changes):
    return dataclasses.replace(config, batch=(Phase(global_batch=batch, per_worker_batch=per_worker),), **changes)


def test_step_without_reductions_has_no_collectives(tiny):
    """Not even for synchronized batch normalization."""
    config = with_batch(tiny, 8, model=dataclasses.replace(tiny.model, norm="synchronized"))
    mesh = make_mesh(2, 2)
    without = step_runner.build_step(config, mesh, global_batch=8, strategy=allreduce.no_reduce).step.as_text()
    assert read_schedule(without, 4).collectives == []
    assert read_schedule(step_runner.build_step(config, mesh, global_batch=8, strategy="torus").step.as_text(), 4).collectives
