"""Experiment 4 of the paper: configuration A, four batch sizes from 34,816 to 121,856.

    python train.py --config imagenet_sony_exp4
    jaxdp plan --config imagenet_sony_exp4 --devices 8

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233v2, Tables 3 to 5.
Published: 75.23 % top-1 in 129 s, 4,096 V100 GPUs on a 64x64 torus.
Our choices where the source is silent or contradicts itself, and flags for alternatives:

    smoothing      0.1; Table 3 has a tick and no value, and the text says none: `--optimizer.label-smoothing 0`
    workers        4,352 with 16 images from epoch 30 to 45, more than the 4,096 GPUs, some of which had two micro-batches. Here
                   all used devices have equally many workers. As 2,176 with 32 images: `--batch.1.per-worker-batch 32`
    momentum       0.9 in every phase, as section 3.2 states for configuration A. The rule of configuration B:
                   `--optimizer.momentum-rule noise_scale`, or as printed: `--optimizer.momentum-rule as_printed`
    warm-up        34 epochs; 12 in the commit that the paper cites: `--schedule.warmup-epochs 12`. The
                   final rate is 1e-4; for 0: `--schedule.end 0`
    precision      float16 with loss scaling, as published; dynamic, since the kind is not given. Today's choice:
                   `--model.dtype bfloat16 --loss-scale.name none --reduce.wire-dtype bfloat16`
    trust coefficient  0.001, as in the first author's library; the paper prints 0.01: `--optimizer.trust-coefficient 0.01`
    trust ratio    not for biases and batch normalization, nor weight decay, as in TensorFlow's lars_util, the source of
                   configuration A; the paper does not say. The first author's library adapts every tensor:
                   `--optimizer.adapt all`
    weight decay   not given; 1e-4 as in the LARS authors' solver: `--optimizer.weight-decay`
    augmentation   ranges not given; the public ImageNet values of the first author's library, stored images of 320 pixels
"""

from jaxdp.config import Config, Data, LossScale, Model, Optimizer, Phase, Reduce, Schedule


def config() -> Config:
    return Config(
        name="imagenet_sony_exp4",
        epochs=90.0,
        data=Data(source="imagenet2012", image_size=224, stored_size=320, augmentation="paper"),
        model=Model(depth=50, classes=1000, dtype="float16", norm="per_worker", statistics="last_batch"),
        batch=(
            Phase(global_batch=2176 * 16, per_worker_batch=16, until_epoch=30.0),
            Phase(global_batch=4352 * 16, per_worker_batch=16, until_epoch=45.0),
            Phase(global_batch=2720 * 32, per_worker_batch=32, until_epoch=75.0),
            Phase(global_batch=3808 * 32, per_worker_batch=32),
        ),
        optimizer=Optimizer(name="lars", momentum=0.9, momentum_rule="constant", weight_decay=1e-4, label_smoothing=0.1),
        schedule=Schedule(name="sony_a", learning_rate=34.0, warmup_epochs=34.0, start=1e-5, end=1e-4, power=2.0),
        loss_scale=LossScale(name="dynamic"),
        reduce=Reduce(strategy="torus", wire_dtype="float16"),
    )
