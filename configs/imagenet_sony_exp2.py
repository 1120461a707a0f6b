"""Experiment 2 of the paper: configuration B, label smoothing, 55,296 images a step throughout.

    python train.py --config imagenet_sony_exp2
    jaxdp plan --config imagenet_sony_exp2 --devices 8

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233v2, Tables 3 to 5.
Published: 75.29 % top-1 in 122 s, 3,456 V100 GPUs on a 48x72 torus.
Our choices where the source is silent or contradicts itself, and flags for alternatives:

    smoothing      0.1; Table 3 has a tick and no value: `--optimizer.label-smoothing 0.05`
    momentum       computed from the batch in configuration B. 0.9 at 32,768 and a constant noise scale for larger batches. The
                   printed formula gives less momentum for larger batches: `--optimizer.momentum-rule as_printed`. 0.9
                   throughout: `--optimizer.momentum-rule constant`
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
        name="imagenet_sony_exp2",
        epochs=90.0,
        data=Data(source="imagenet2012", image_size=224, stored_size=320, augmentation="paper"),
        model=Model(depth=50, classes=1000, dtype="float16", norm="per_worker", statistics="last_batch"),
        batch=(
            Phase(global_batch=3456 * 16, per_worker_batch=16, until_epoch=30.0),
            Phase(global_batch=1728 * 32, per_worker_batch=32),
        ),
        optimizer=Optimizer(name="lars", momentum=0.9, momentum_rule="noise_scale", weight_decay=1e-4, label_smoothing=0.1),
        schedule=Schedule(
            name="sony_b", learning_rate=29.0, warmup_epochs=5.0, start=0.2, power=2.0, boundaries=(30.0,), factor=50 / 29
        ),
        loss_scale=LossScale(name="dynamic"),
        reduce=Reduce(strategy="torus", wire_dtype="float16"),
    )
