"""Proofs of reductions hold for correct strategies and fail for faulty ones."""

import dataclasses

import jax
import jax.numpy as jnp
from helpers.strategies import replace_strategies
from jax import lax

from jaxdp.config import Config, Data, Mesh, Model
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.doctor import verify_sums
from jaxdp.models.resnet import TWO_BLOCKS
from jaxdp.parallel.mesh import AXES
from jaxdp.sizes import model_summary
from jaxdp.strategies import STRATEGIES

SMALL = Config(model=Model(depth=TWO_BLOCKS, width=4, stem="small", classes=6), data=Data(source="synthetic", image_size=16))


def test_proofs_hold_for_every_strategy_on_the_mesh_of_the_recipe():
    config = dataclasses.replace(SMALL, mesh=Mesh(vertical=4, horizontal=2))
    proofs = list(verify_sums.proofs(config, jax.devices(), info=print, group=ProcessGroup()))
    assert [proof.name for proof in proofs] == [f"exact sums: {name} on 4x2" for name in STRATEGIES]
    assert [(proof.passed, proof.difference) for proof in proofs] == [(True, 0)] * len(proofs)
    assert f"{4 * model_summary(SMALL)['parameters']:,} bytes of float32" in proofs[0].comparison


def test_proof_of_a_sum_without_one_element_fails(monkeypatch):
    def faulty(vector):
        lost = (lax.axis_index(AXES) == 1) & (jnp.arange(vector.size) == vector.size - 1)
        return lax.psum(jnp.where(lost, 0, vector), AXES)

    replace_strategies(monkeypatch, {"torus": (faulty,)})
    (proof,) = verify_sums.proofs(SMALL, jax.devices()[:2], info=print, group=ProcessGroup())
    assert (proof.passed, proof.difference) == (False, verify_sums.CALLS)


def test_mesh_shape_of_a_recipe_that_does_not_fit_is_the_most_square_one():
    assert verify_sums.mesh_shape(dataclasses.replace(SMALL, mesh=Mesh(vertical=48, horizontal=72)), 8, 1) == (2, 4)
