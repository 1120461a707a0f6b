"""The gradient with the Pallas kernel of benchmarks/gpu_leads.py, interpreted on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import gpu_leads, jax, jax.numpy as jnp, numpy as np
from jaxdp import models
from jaxdp.config import Model
from jaxdp.models import resnet

resnet.BLOCKS[50] = (2, 1, 1, 2)  # the kernel is behind the first block of a stage
model = models.create(Model(classes=5, batch_norm="folded"), platform="any")
images = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32, 32, 3)), jnp.float32)
params, stats = model.init(jax.random.key(0), (32, 32, 3))
params = jax.tree.map(lambda leaf: leaf + 0.05 * (leaf.ndim == 1) * jax.random.normal(jax.random.key(1), leaf.shape), params)

def gradient():
    return jax.jit(jax.grad(lambda params: jnp.sin(model.apply(params, stats, images, train=True)[0]).sum()))(params)

plain, gpu_leads.INTERPRET = gradient(), True
gpu_leads.input_gradient_kernel()
model = models.create(Model(classes=5, batch_norm="folded"), platform="any")
assert str(jax.make_jaxpr(lambda: gradient())()).count("pallas_call[") == 2
for one, other in zip(jax.tree.leaves(gradient()), jax.tree.leaves(plain), strict=True):
    assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)
"""


@pytest.mark.slow
def test_input_gradient_kernel_leaves_the_gradient():
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT / "benchmarks", check=True)
