"""Goyal et al.: ResNet-50 on ImageNet with 8,192 images per step, SGD with the linear scaling rule and gradual warm-up.

    python train.py --config imagenet_goyal_8k
    jaxdp plan --config imagenet_goyal_8k --devices 8

Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv 1706.02677, sections 2 and 5.1.
Published: top-1 within 0.14 % of that at 256 images, 256 P100 GPUs, one hour.
Our choices where the source is silent, and flags for alternatives:

    network        v1.5 (stride on the 3x3 convolution), as in their code
    precision      float32, as published; today's choice: `--model.dtype bfloat16`
    weight decay   not on batch normalization, as published, nor on the bias of the last layer
    statistics     moving averages with a decay of 0.9 per step: `--model.norm-momentum`
    augmentation   random resized crop of 8 to 100 % of the stored image, and flip, without their color changes
"""

from jaxdp.config import Config, Data, Model, Optimizer, Phase, Schedule


def config() -> Config:
    return Config(
        name="imagenet_goyal_8k",
        epochs=90.0,
        data=Data(source="imagenet2012", image_size=224, augmentation="random_resized_crop"),
        model=Model(depth=50, classes=1000, norm="per_worker"),
        batch=(Phase(global_batch=8192, per_worker_batch=32),),
        optimizer=Optimizer(name="sgd", momentum=0.9, nesterov=True, weight_decay=1e-4),
        schedule=Schedule(name="goyal", learning_rate=0.1, warmup_epochs=5.0, boundaries=(30.0, 60.0, 80.0), factor=0.1),
    )
