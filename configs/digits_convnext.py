"""A small ConvNeXt in Flax linen on handwritten digits: an example of `jaxdp.register_model`.

    python train.py --config digits_convnext

Source: Liu et al. (arXiv 2201.03545): depthwise convolution, layer norm, perceptron, layer scale, shortcut. Our choices: small
kernels, two widths, and the schedule. The run takes about a minute on two CPU cores and classifies more than 97 % of the
held-out images correctly.
"""

import flax.linen as nn

import jaxdp
from jaxdp.config import Config, Data, Mesh, Model, Optimizer, Phase, Schedule


class Block(nn.Module):
    """A ConvNeXt block; with a stride, a layer norm and a strided convolution come first."""

    width: int
    stride: int = 1
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x, train):
        if self.stride > 1:
            x = nn.LayerNorm(dtype=self.dtype)(x)
            x = nn.Conv(self.width, (self.stride, self.stride), self.stride, dtype=self.dtype)(x)
        y = nn.Conv(self.width, (3, 3), feature_group_count=self.width, dtype=self.dtype)(x)
        y = nn.Dense(4 * self.width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(y))
        y = nn.Dense(self.width, dtype=self.dtype)(nn.gelu(y, approximate=False))
        y = y * self.param("layer_scale", nn.initializers.constant(0.1), (self.width,)).astype(y.dtype)
        return x + nn.Dropout(0.1, deterministic=not train)(y)


class ConvNeXt(nn.Module):
    """Images [B, H, W, 3] to logits [B, classes]."""

    classes: int
    widths: tuple = (24, 48)
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(self.widths[0], (2, 2), 2, dtype=self.dtype)(x)
        for number, width in enumerate(self.widths):
            x = Block(width, stride=2 if number else 1, dtype=self.dtype)(x, train)
            x = Block(width, dtype=self.dtype)(x, train)
        return nn.Dense(self.classes)(nn.LayerNorm()(x.mean((1, 2))))


def config() -> Config:
    jaxdp.register_model("digits_convnext", ConvNeXt)
    return Config(
        name="digits_convnext",
        epochs=12.0,
        data=Data(source="digits", image_size=16, augmentation="digits"),
        model=Model(name="digits_convnext", classes=10),
        batch=(Phase(global_batch=64),),
        optimizer=Optimizer(name="sgd", momentum=0.9, label_smoothing=0.1, clip_norm=1.0),
        schedule=Schedule(name="cosine", learning_rate=0.2, warmup_epochs=2.0),
        mesh=Mesh(cpu_devices=4),
    )
