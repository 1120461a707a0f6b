"""The paper's Reference: ResNet-50 on ImageNet at a constant batch of 32,768, LARS, no label smoothing.

    python train.py --config imagenet_lars_32k
    jaxdp plan --config imagenet_lars_32k --devices 8

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233v2, Tables 3 to 5.
Published: 75.40 % top-1 in 505 s, 1,024 V100 GPUs on a 32x32 torus.
Our choices where the source is silent or contradicts itself, and flags for alternatives:

    schedule       given as "You et al." only; here 0.2 to 29 over 5 epochs, then 29 (1 - epoch / 90)^2, momentum 0.9. Without
                   the drop at the end of the warm-up: `--schedule.name polynomial`; from 0: `--schedule.start 0`
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
        name="imagenet_lars_32k",
        epochs=90.0,
        data=Data(source="imagenet2012", image_size=224, stored_size=320, augmentation="paper"),
        model=Model(depth=50, classes=1000, dtype="float16", norm="per_worker", statistics="last_batch"),
        batch=(Phase(global_batch=32768, per_worker_batch=32),),
        optimizer=Optimizer(name="lars", momentum=0.9, momentum_rule="constant", weight_decay=1e-4, label_smoothing=0.0),
        schedule=Schedule(name="sony_b", learning_rate=29.0, warmup_epochs=5.0, start=0.2, power=2.0),
        loss_scale=LossScale(name="dynamic"),
        reduce=Reduce(strategy="torus", wire_dtype="float16"),
    )
