"""Optimisers as optax transformations."""

from jaxdp.optim.build import build
from jaxdp.optim.lars import lars

__all__ = ["build", "lars"]
