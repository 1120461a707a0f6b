"""`jaxdp.create_state`: the state with which a user's own loop around `jaxdp.make_train_step` begins."""

from jax.sharding import Mesh

from jaxdp.config import Config
from jaxdp.network import Network
from jaxdp.training import state
from jaxdp.training.state import TrainState
from jaxdp.training.step import make_layout


def create_state(config: Config, model: Network, mesh: Mesh) -> TrainState:
    """The state before the first step, drawn from `config.seed`, as the step of `make_train_step` takes it.

    With `reduce.update sharded`, what an update changes is in shards: `make_layout(config, model, mesh)` of
    `jaxdp.training.step` has `eval_variables(state)` and `gather_state(state)`, which gather it.
    """
    return make_layout(config, model, mesh).place(state.create_state(config, model, mesh))
