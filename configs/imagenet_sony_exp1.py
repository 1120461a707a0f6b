"""Experiment 1 of the paper: configuration A, 34,816 images a step, then 69,632 from epoch 30 on.

    python train.py --config imagenet_sony_exp1
    jaxdp plan --config imagenet_sony_exp1 --devices 8

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233v2, Tables 3 to 5.
Published: 75.03 % top-1 in 224 s, 2,176 V100 GPUs on a 34x64 torus, with a previous version of their software.
Our choices where the source is silent or contradicts itself, and flags for alternatives:

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
        name="imagenet_sony_exp1",
        epochs=90.0,
        data=Data(source="imagenet2012", image_size=224, stored_size=320, augmentation="paper"),
        model=Model(depth=50, classes=1000, dtype="float16", norm="per_worker", statistics="last_batch"),
        batch=(
            Phase(global_batch=2176 * 16, per_worker_batch=16, until_epoch=30.0),
            Phase(global_batch=2176 * 32, per_worker_batch=32),
        ),
        optimizer=Optimizer(name="lars", momentum=0.9, momentum_rule="constant", weight_decay=1e-4, label_smoothing=0.0),
        schedule=Schedule(name="sony_a", learning_rate=34.0, warmup_epochs=34.0, start=1e-5, end=1e-4, power=2.0),
        loss_scale=LossScale(name="dynamic"),
        reduce=Reduce(strategy="torus", wire_dtype="float16"),
    )
