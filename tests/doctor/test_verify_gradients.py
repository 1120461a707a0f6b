"""Proofs of the training step hold for correct strategies and fail for faulty ones."""

import jax
import pytest
from helpers.strategies import replace_strategies
from jax import lax

from jaxdp.config import Compile
from jaxdp.distributed.process_group import ProcessGroup
from jaxdp.doctor import verify_gradients
from jaxdp.parallel.mesh import AXES, VERTICAL


def run_proofs(monkeypatch, strategies):
    """The proofs by name, on two devices, for these strategies alone."""
    replace_strategies(monkeypatch, strategies)
    proofs = verify_gradients.proofs(jax.devices()[:2], Compile(), shapes=[(1, 2), (2, 1)], info=print, group=ProcessGroup())
    return {proof.name: proof for proof in proofs}


@pytest.mark.slow
def test_proofs_of_a_strategy_that_sums_over_one_axis_fail_on_the_meshes_that_have_it(monkeypatch):
    def faulty(vector):
        return lax.psum(vector, AXES) * lax.axis_size(VERTICAL)

    proofs = run_proofs(monkeypatch, {"torus": (faulty,)})
    assert {name: proof.passed for name, proof in proofs.items()} == {
        "gradient: torus on 1x2": True,
        "same bits: torus on 1x2": True,
        "gradient: torus on 2x1": False,
        "same bits: torus on 2x1": True,
    }
    assert proofs["gradient: torus on 1x2"].difference < 1e-6
    assert proofs["gradient: torus on 2x1"].difference == pytest.approx(1 / 1.1, abs=0.1)  # twice the gradient


@pytest.mark.slow
def test_proofs_of_a_strategy_with_different_results_per_device_fail(monkeypatch):
    def faulty(vector):
        return lax.psum(vector, AXES) * (1 + 1e-6 * lax.axis_index(AXES))

    proofs = run_proofs(monkeypatch, {"ring": (faulty,)})
    assert proofs["gradient: ring on 1x2"].passed  # the first device's gradient is well within the tolerance
    assert not proofs["same bits: ring on 1x2"].passed


def test_proofs_of_a_registered_strategy_that_does_not_compile_fail_with_the_error(monkeypatch):
    def broken(vector):
        raise RuntimeError("no such link\nand more")

    monkeypatch.setattr(verify_gradients, "single_device_gradient", lambda *_: {})
    proofs = run_proofs(monkeypatch, {"mine": (broken,)})
    assert {name: proof.passed for name, proof in proofs.items()} == {
        "gradient: mine on 1x2": False,
        "gradient: mine on 2x1": False,
    }
    assert proofs["gradient: mine on 1x2"].error == "RuntimeError: no such link"
