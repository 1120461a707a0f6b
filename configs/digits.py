"""ResNet-50 on scikit-learn's handwritten digits: the default run.

    python train.py

1,797 real images (Alpaydin & Kaynak, UCI), 360 of them held out, enlarged from 8x8 to 32x32. A 2x2 mesh of virtual CPU
devices where there is no accelerator, all accelerators where there are. Epochs and learning rate were chosen on a split of the
training images, the rate by the loss there (benchmarks/digits_search.py).
"""

from jaxdp.config import Config, Data, Logging, Mesh, Model, Optimizer, Phase, Reduce, Schedule


def config() -> Config:
    return Config(
        name="digits",
        epochs=10.0,
        data=Data(source="digits", image_size=32, augmentation="digits"),
        # norm_momentum: statistics of the last few steps, an epoch having only eleven
        model=Model(depth=50, stem="imagenet", classes=10, norm_momentum=0.7),
        batch=(Phase(global_batch=128, until_epoch=6.0), Phase(global_batch=256)),
        optimizer=Optimizer(name="lars", momentum=0.9, weight_decay=1e-4, label_smoothing=0.1),
        schedule=Schedule(name="polynomial", learning_rate=8.0, warmup_epochs=2.0),
        mesh=Mesh(cpu_devices=4),
        reduce=Reduce(bucket_bytes=65_536),  # on a CPU packing large tensors costs more than sending them alone
        logging=Logging(every_steps=5),
    )
