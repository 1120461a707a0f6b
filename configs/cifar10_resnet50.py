"""ResNet-50 on CIFAR-10 with the small stem: SGD, pad and crop, 60 epochs.

    python train.py --config cifar10_resnet50
    jaxdp plan --config cifar10_resnet50 --devices 4

Source: no single paper; He et al. (arXiv 1512.03385, section 4.2) for the augmentation, Goyal et al. (arXiv 1706.02677) for the
scaling of the learning rate. Everything else is our choice.
"""

from jaxdp.config import Config, Data, Model, Optimizer, Phase, Schedule


def config() -> Config:
    return Config(
        name="cifar10_resnet50",
        epochs=60.0,
        data=Data(source="cifar10", image_size=32, augmentation="pad_and_crop"),
        model=Model(depth=50, stem="small", classes=10),
        batch=(Phase(global_batch=512),),
        optimizer=Optimizer(name="sgd", momentum=0.9, nesterov=True, weight_decay=5e-4, label_smoothing=0.1),
        schedule=Schedule(name="cosine", learning_rate=0.2, warmup_epochs=5.0),
    )
