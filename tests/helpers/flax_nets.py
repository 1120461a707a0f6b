"""Small linen and nnx networks with stages, batch normalization and dropout, and their gradients computed by Flax alone."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

CLASSES = 7


class LinenBlock(nn.Module):
    """Convolution, batch normalization, ReLU, dropout."""

    features: int
    momentum: float = 0.9
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=self.momentum)(x)
        return nn.Dropout(self.dropout, deterministic=not train)(nn.relu(x))


class LinenHead(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(x.mean((1, 2)))


class LinenNet(nn.Module):
    """Two blocks and a head, in one segment."""

    classes: int = CLASSES
    momentum: float = 0.9
    dropout: float = 0.0

    def setup(self):
        self.blocks = [LinenBlock(features, self.momentum, self.dropout) for features in (5, 6)]
        self.head = LinenHead(self.classes)

    def __call__(self, x, train):
        for block in self.blocks:
            x = block(x, train)
        return self.head(x)


class StagedLinenNet(LinenNet):
    """The same in three segments."""

    def stages(self):
        return (*self.blocks, self.head)


class RematLinenNet(nn.Module):
    """The same layers; the blocks' activations are computed again in the backward pass."""

    classes: int = CLASSES

    def setup(self):
        self.blocks = [nn.remat(LinenBlock, static_argnums=2)(features) for features in (5, 6)]
        self.head = LinenHead(self.classes)

    __call__ = LinenNet.__call__


class NnxBlock(nnx.Module):
    """Convolution, batch normalization, ReLU, dropout."""

    def __init__(self, channels, features, momentum, dropout, *, rngs):
        self.conv = nnx.Conv(channels, features, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features, momentum=momentum, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return self.dropout(nnx.relu(self.norm(self.conv(x))))


class NnxHead(nnx.Module):
    def __init__(self, features, classes, *, rngs):
        self.linear = nnx.Linear(features, classes, rngs=rngs)

    def __call__(self, x):
        return self.linear(x.mean((1, 2)))


class NnxNet(nnx.Module):
    """Two blocks and a head, in one segment, and a constant."""

    def __init__(self, classes=CLASSES, momentum=0.9, dropout=0.0, *, rngs):
        self.blocks = nnx.List([NnxBlock(*sizes, momentum, dropout, rngs=rngs) for sizes in ((3, 5), (5, 6))])
        self.head = NnxHead(6, classes, rngs=rngs)
        self.constant = jnp.zeros(())

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.constant


class StagedNnxNet(NnxNet):
    """The same in three segments."""

    def stages(self):
        return [*self.blocks, self.head]


BUILDERS = {
    "linen": lambda config: LinenNet(config.classes),
    "linen_stages": lambda config: StagedLinenNet(config.classes),
    "linen_remat": lambda config: RematLinenNet(config.classes),
    "nnx": lambda config, rngs: NnxNet(config.classes, rngs=rngs),
    "nnx_stages": lambda config, rngs: StagedNnxNet(config.classes, rngs=rngs),
}
WITH_DROPOUT = {
    "linen": lambda config: LinenNet(config.classes, dropout=0.5),
    "linen_stages": lambda config: StagedLinenNet(config.classes, dropout=0.5),
    "nnx": lambda config, rngs: NnxNet(config.classes, dropout=0.5, rngs=rngs),
    "nnx_stages": lambda config, rngs: StagedNnxNet(config.classes, dropout=0.5, rngs=rngs),
}


def by_path(tree):
    """Leaves of jaxdp's params or batch_stats by their path in the module, as float64 arrays."""
    names = ((jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in jax.tree.leaves_with_path(tree))
    return {name.removeprefix("net/"): np.asarray(leaf, np.float64) for name, leaf in names}


def flax_gradients(name, params, batch_stats, loss_of, batches):
    """(gradient, statistics after the call) in training mode, by path, for each batch: by Flax without jaxdp.

    params, batch_stats: jaxdp's. loss_of: function of a batch and of the network as a function of images.
    """
    params, batch_stats = ({key: jnp.float32(leaf) for key, leaf in by_path(tree).items()} for tree in (params, batch_stats))
    compute = _linen_gradient if name.startswith("linen") else _nnx_gradient
    return [compute(params, batch_stats, loss_of, batch) for batch in batches]


@functools.partial(jax.jit, static_argnums=2)
def _linen_gradient(params, batch_stats, loss_of, batch):
    def loss(flat):
        def network(images):
            variables = {"params": nested(flat), "batch_stats": nested(batch_stats)}
            logits, changed = LinenNet().apply(variables, images, train=True, mutable=["batch_stats"])
            changes.update(changed["batch_stats"])
            return logits

        changes = {}
        return loss_of(batch, network), changes

    return jax.grad(loss, has_aux=True)(params)


@functools.partial(jax.jit, static_argnums=2)
def _nnx_gradient(params, batch_stats, loss_of, batch):
    module = NnxNet(rngs=nnx.Rngs(0))
    nnx.update(module, nnx.from_flat_state({path_of(key): leaf for key, leaf in (params | batch_stats).items()}))
    module.train()
    gradient = nnx.grad(lambda module: loss_of(batch, module))(module)
    return of_state(gradient), of_state(nnx.state(module, nnx.BatchStat))


def nested(flat):
    """Nested dicts of leaves by path."""
    tree = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def path_of(name):
    """The path in an nnx module, where lists have integer indices."""
    return tuple(int(part) if part.isdigit() else part for part in name.split("/"))


def of_state(state):
    return {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
