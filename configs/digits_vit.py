"""A small vision transformer (ViT) in Flax nnx, with dropout, on handwritten digits: an example of `jaxdp.register_model`.

    python train.py --config digits_vit

Source: Dosovitskiy et al. (arXiv 2010.11929). Our choices: four blocks of 64 channels, and the schedule. The run takes about a
minute on two CPU cores and classifies more than 97 % of the held-out images correctly.
"""

import jax
from flax import nnx

import jaxdp
from jaxdp.config import Config, Data, Mesh, Model, Optimizer, Phase, Schedule


class Patches(nnx.Module):
    """Patches [B, N, width] of images [B, H, W, 3], with their positions."""

    def __init__(self, size, width, *, rngs, dtype):
        self.embed = nnx.Conv(3, width, (size, size), strides=size, padding="VALID", dtype=dtype, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), ((16 // size) ** 2, width)))

    def __call__(self, images):
        x = self.embed(images)
        return x.reshape(len(x), -1, x.shape[-1]) + self.position.astype(x.dtype)


class Block(nnx.Module):
    """Attention and a perceptron, each behind a layer norm and beside a shortcut."""

    def __init__(self, width, heads, *, rngs, dtype):
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.reduce = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.reduce(nnx.gelu(self.expand(self.norm2(x)))))


class Head(nnx.Module):
    """Logits from the mean over the patches."""

    def __init__(self, width, classes, *, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.linear = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.norm(x.mean(1)))


class ViT(nnx.Module):
    """jaxdp calls the stages one after the other, and sends each one's gradient while it computes the next."""

    def __init__(self, config, rngs, width=64, blocks=4):
        self.patches = Patches(4, width, rngs=rngs, dtype=config.dtype)
        self.blocks = nnx.List([Block(width, 4, rngs=rngs, dtype=config.dtype) for _ in range(blocks)])
        self.head = Head(width, config.classes, rngs=rngs)

    def stages(self):
        return [self.patches, *self.blocks, self.head]


def config() -> Config:
    jaxdp.register_model("digits_vit", ViT)
    return Config(
        name="digits_vit",
        epochs=30.0,
        data=Data(source="digits", image_size=16, augmentation="digits"),
        model=Model(name="digits_vit", classes=10),
        batch=(Phase(global_batch=64),),
        optimizer=Optimizer(name="sgd", momentum=0.9, label_smoothing=0.1, clip_norm=1.0),
        schedule=Schedule(name="cosine", learning_rate=0.2, warmup_epochs=3.0),
        mesh=Mesh(cpu_devices=4),
    )
