"""Loading a file of weights, to evaluate it or to predict with it."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from jaxdp.choices import TASKS
from jaxdp.config import Config, Data, Optimizer, Preprocessing
from jaxdp.config_words import evaluation_words
from jaxdp.distributed import runtime
from jaxdp.errors import ConfigError
from jaxdp.files import expand_user, read_regular
from jaxdp.models import preprocessing, weights
from jaxdp.parallel.mesh import make_mesh
from jaxdp.training.state import from_host
from jaxdp.validation import validate
from jaxdp.xla.jax_options import jaxdp_jax_config

WEIGHTS = "--weights"


class LoadedWeights(NamedTuple):
    """A file of weights on the devices. eval_variables: (params, batch_stats). words: network, digest, preprocessing."""

    eval_variables: tuple[dict, dict]
    mesh: jax.sharding.Mesh
    config: Config
    words: str


def weights_config(path: str | Path, given: Preprocessing | None = None, *, blur_pool: str = "none") -> Config:
    """A config that evaluates a file of weights on given images, prepared as the file states, or else as usual.

    given: preprocessing that replaces what the file states. blur_pool: `model.blur_pool` of a file that states none. Raises
    ConfigError for a file that cannot be used.
    """
    path = expand_user(path, WEIGHTS)
    model = weights.read(path, WEIGHTS, blur_pool=blur_pool).model
    stated = preprocessing.merge(preprocessing.USUAL, preprocessing.of_file(path, WEIGHTS))
    data = preprocessing.with_preprocessing(Data(source="given"), preprocessing.merge(stated, given or Preprocessing()))
    task = preprocessing.metadata_of(read_regular(path, preprocessing.MAX_FILE_BYTES)).get("task", Config.task)
    optimizer = Optimizer(loss=(*TASKS[task].losses, Optimizer.loss)[0])
    return validate(Config(name="weights", task=task, data=data, model=model, optimizer=optimizer))


@jaxdp_jax_config()
def load_weights(path: str | Path, config: Config) -> LoadedWeights:
    """Read a file of weights onto all devices of this machine. config: from `weights_config`, with changes.

    Raises ConfigError for a file that cannot be used, and for one of another network than the config's.
    """
    config, read = validate(config), weights.read(path, WEIGHTS, blur_pool=config.model.blur_pool)
    if weights.network_json(read.model) != weights.network_json(config.model):
        reason = f"it is a {read.describe()}, and not the network of the options"
        raise ConfigError(WEIGHTS, str(path), reason=reason, hint="omit the model options")
    devices = runtime.start(config.mesh, cache=True)
    mesh = make_mesh(config.mesh.vertical, config.mesh.horizontal, devices)
    params, batch_stats = (jax.tree.map(partial(from_host, mesh=mesh), tree) for tree in (read.params, read.batch_stats))
    words = f"{path}: {read.describe()}, digest {read.digest}, {evaluation_words(config)}"
    return LoadedWeights((params, batch_stats), mesh, config, words)
