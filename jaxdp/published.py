"""Recipes that a source publishes in several sizes: one function for each source, with what its recipes have in common.

The files in configs/ call these functions with what differs between them, and name the source and its result.
"""

from typing import Any

from jaxdp.config import Augment, Config, Data, Model, Optimizer, Phase, Reduce, Schedule


def mlperf(
    name: str, *, epochs: float, batch: Phase, learning_rate: float, warmup: float, weight_decay: float, momentum: float
) -> Config:
    """ResNet-50 on ImageNet with LARS, as the reference of MLPerf training v4.0. batch: the only phase; warmup: in epochs.

    Our reading of the source, our choices where it is silent or not followed, and flags for alternatives:

        initialization as in Goyal et al.: He by fan-out, zero scale in the last batch normalization of each block.
                       The reference uses He by fan-in and scales of 1; there is no flag for it
        precision      bfloat16 compute, float32 gradients on the wire: `--model.dtype float32`
        augmentation   random resized crop of 5 to 100 % and flip, without the reference's bounding boxes. Area and logarithm of
                       the ratio, 3/4 to 4/3, are uniform; TensorFlow draws the height and the ratio, 0.75 to 1.33, uniformly
        evaluation     an antialiased filter; the reference resizes without one; there is no flag for it
    """
    mean = (123.68 / 255, 116.78 / 255, 103.94 / 255)
    std = (1 / 255,) * 3  # the reference does not divide by a standard deviation
    return Config(
        name=name,
        epochs=epochs,
        data=Data(source="imagenet2012", image_size=224, mean=mean, std=std, augmentation="random_resized_crop"),
        augment=Augment(min_area=0.05),
        model=Model(depth=50, classes=1000, dtype="bfloat16"),
        batch=(batch,),
        optimizer=Optimizer(name="lars", momentum=momentum, weight_decay=weight_decay, eps=0.0, label_smoothing=0.1),
        schedule=Schedule(name="polynomial", learning_rate=learning_rate, warmup_epochs=warmup, end=1e-4, power=2.0),
    )


CONFIGURATION_A = Schedule(name="sony_a", learning_rate=34.0, warmup_epochs=34.0, start=1e-5, end=1e-4, power=2.0)
CONFIGURATION_B = Schedule(
    name="sony_b", learning_rate=29.0, warmup_epochs=5.0, start=0.2, power=2.0, boundaries=(30.0,), factor=50 / 29
)


def mikami(name: str, *, batch: tuple[Phase, ...], schedule: Schedule, label_smoothing: float, **optimizer: Any) -> Config:
    """ResNet-50 on ImageNet with LARS on a torus, as Mikami et al. schedule: of configuration A or B of the paper.

    optimizer: further fields of `Optimizer`. In configuration A the momentum is 0.9 in every phase, as section 3.2 says.
    Our choices where the source is silent or contradicts itself, and flags for alternatives:

        momentum       of configuration A; the rule of configuration B: `--optimizer.momentum-rule noise_scale`, or as printed:
                       `--optimizer.momentum-rule as_printed`. In configuration B it is computed from the batch: 0.9 at 32,768
                       and a constant noise scale for larger batches. The printed formula gives less momentum for larger
                       batches: `--optimizer.momentum-rule as_printed`. 0.9 throughout: `--optimizer.momentum-rule constant`
        warm-up        of configuration A 34 epochs; 12 in the commit that the paper cites: `--schedule.warmup-epochs 12`. The
                       final rate is 1e-4; for 0: `--schedule.end 0`
        precision      float16 with loss scaling, as published; dynamic, since the kind is not given. Today's choice:
                       `--model.dtype bfloat16 --optimizer.loss-scale none --reduce.wire-dtype bfloat16`
        trust coefficient  0.001, as in the first author's library; the paper prints 0.01: `--optimizer.trust-coefficient 0.01`
        trust ratio    not for biases and batch normalization, nor weight decay, as in TensorFlow's lars_util, the source of
                       configuration A; the paper does not say. The first author's library adapts every tensor:
                       `--optimizer.adapt all`
        weight decay   not given; 1e-4 as in the LARS authors' solver: `--optimizer.weight-decay`
        augmentation   ranges not given; the public ImageNet values of the first author's library, stored images of 320 pixels
    """
    return Config(
        name=name,
        epochs=90.0,
        data=Data(source="imagenet2012", image_size=224, stored_size=320, augmentation="paper"),
        model=Model(depth=50, classes=1000, dtype="float16", norm="per_worker", norm_momentum=0.0),
        batch=batch,
        optimizer=Optimizer(
            name="lars", momentum=0.9, weight_decay=1e-4, label_smoothing=label_smoothing, loss_scale="dynamic", **optimizer
        ),
        schedule=schedule,
        reduce=Reduce(strategy="torus", wire_dtype="float16"),
    )


def rsb(
    name: str,
    *,
    epochs: float,
    learning_rate: float,
    weight_decay: float,
    mix_alpha: float,
    magnitude: float,
    drop_path: float = 0.0,
    label_smoothing: float = 0.0,
    **data: Any,
) -> Config:
    """ResNet-50 on ImageNet with LAMB, as "ResNet strikes back". data: further fields of `Data`.

    Our choices where the source is silent or not followed, and flags for alternatives:

        per worker     batch normalization over 256 images on 8 GPUs; the source's 4 GPUs have 512 each:
                       `--batch.0.per-worker-batch`
        mixed labels   every class that a mixed image contains is a target of 1 (section 3.1), if its share exceeds 0.2, the
                       threshold in training commands of timm: `--optimizer.target-threshold 0.5`
        switching      mixup or CutMix with probability 1/2, timm's default
        gradients      clipped to norm 1, the default of timm's LAMB: `--optimizer.clip-norm 5`
        epsilon        1e-6 in LAMB, timm's default
        warm-up        5 epochs from 1e-4; the end of the cosine is 1e-6, both defaults of timm: `--schedule.start 0`
        end            with the cosine; timm trains 10 more epochs at 1e-6, the default of `--cooldown-epochs` then
        rate           changes every step, and the cosine begins at the end of the warm-up; timm's changes every epoch and
                       counts from epoch 0
        interpolation  of crops and operations at random bilinear or bicubic, timm's default:
                       `--augment.crop-interpolation bicubic`
        precision      bfloat16 compute; the source has mixed precision: `--model.dtype float32`
    """
    images = {"image_size": 224} | data
    return Config(
        name=name,
        epochs=epochs,
        data=Data(
            source="imagenet2012",
            eval_resize=0.95,
            eval_interpolation="bicubic",
            augmentation="random_resized_crop",
            auto_augment="rand_augment_increasing",
            mix="mixup_or_cutmix",
            mix_alpha=mix_alpha,
            **images,
        ),
        augment=Augment(crop_interpolation="random", magnitude=magnitude),
        model=Model(depth=50, classes=1000, dtype="bfloat16", drop_path=drop_path),
        batch=(Phase(global_batch=2048, per_worker_batch=256),),
        optimizer=Optimizer(
            name="lamb",
            weight_decay=weight_decay,
            clip_norm=1.0,
            loss="binary",
            target_threshold=0.2,
            label_smoothing=label_smoothing,
        ),
        schedule=Schedule(name="cosine", learning_rate=learning_rate, warmup_epochs=5.0, start=1e-4, end=1e-6),
    )
