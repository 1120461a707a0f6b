"""Parameter updates as optax transformations: optimizers and loss scaling. Learning rates are in `jaxdp/schedules.py`.

`lars` and `lamb` are ordinary optax transformations for any program.
"""

from jaxdp.optim.optimizer import build_optimizer
from jaxdp.optim.rules import lamb, lars

__all__ = ["build_optimizer", "lamb", "lars"]
