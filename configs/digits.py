"""ResNet-50 on scikit-learn's handwritten digits: the default run.

    python train.py

1,797 real images (Alpaydin & Kaynak, UCI), 360 of them held out, enlarged from 8x8 to 32x32. Runs on all accelerators, or on a
2x2 mesh of virtual CPU devices. Batches, epochs, learning rate and statistics were tuned by the loss on a split of the training
images; benchmarks/digits_seeds.py compares seeds and processors.

- batch: 124 steps of 64 and then 128 images take less time than 91 steps of 128 and 256 images, and reach a lower loss.
- trust_coefficient: 0.01, as printed in the paper. LARS scales the learning rate of the weights by it, but not the rate of
  batch normalization and biases. With 0.001 the weights would need a ten times higher rate. At a rate of 8 the statistics for
  evaluation depended on the number of averaged steps.
"""

from jaxdp.config import Config, Data, Logging, Mesh, Model, Optimizer, Phase, Reduce, Schedule


def config() -> Config:
    return Config(
        name="digits",
        epochs=7.0,
        data=Data(source="digits", image_size=32, augmentation="digits"),
        # norm_momentum: statistics of the last few steps, for the last epochs have eleven each
        model=Model(depth=50, stem="imagenet", classes=10, norm_momentum=0.7),
        batch=(Phase(global_batch=64, until_epoch=4.0), Phase(global_batch=128)),
        optimizer=Optimizer(name="lars", momentum=0.9, weight_decay=1e-4, trust_coefficient=0.01, label_smoothing=0.1),
        schedule=Schedule(name="polynomial", learning_rate=0.4, warmup_epochs=2.0),
        mesh=Mesh(cpu_devices=4),
        reduce=Reduce(bucket_bytes=65_536),  # on a CPU packing large tensors costs more than sending them alone
        logging=Logging(every_steps=5),
    )
