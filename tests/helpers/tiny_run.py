"""The run of most tests of whole processes, as a recipe: eight images of 8x8 a step, then sixteen, for four epochs of 64.

Its programs compile much faster than a ResNet's. On a CPU, JAX keeps compiled programs of rank 0 alone, so all other ranks
compile theirs in every run.
"""

import flax.linen as nn

import jaxdp
from jaxdp.config import Config, Data, Logging, Mesh, Model, Optimizer, Phase, Reduce, Schedule


class TinyNet(nn.Module):
    """A convolution, batch normalization and a perceptron: tensors of all kinds."""

    classes: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3), 2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.relu(nn.Dense(32)(x.reshape(len(x), -1)))
        return nn.Dense(self.classes)(x)


def config() -> Config:
    jaxdp.register_model("tiny", TinyNet)
    return Config(
        name="tiny",
        epochs=4.0,
        data=Data(source="synthetic", image_size=8, train_examples=64, eval_examples=37, augmentation="digits"),
        model=Model(name="tiny", classes=10),
        batch=(Phase(8, until_epoch=2.0, per_worker_batch=2), Phase(16, per_worker_batch=2)),
        optimizer=Optimizer(name="sgd", momentum=0.9, label_smoothing=0.1),
        schedule=Schedule(name="polynomial", learning_rate=0.002, warmup_epochs=1.0),
        mesh=Mesh(cpu_devices=4),
        reduce=Reduce(bucket_bytes=4096),  # several messages
        logging=Logging(every_steps=1, tensorboard=False),
    )
