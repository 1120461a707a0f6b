"""ResNet strikes back, procedure A1: 80.4 % in 600 epochs.

    python train.py --config imagenet_rsb_a1
    jaxdp plan --config imagenet_rsb_a1 --devices 8

Source: Wightman, Touvron, Jegou, "ResNet strikes back: An improved training procedure in timm", arXiv 2110.00476, Table 2.
Published: 80.4 % top-1 after 600 epochs, 110 hours on 4 V100 GPUs.
Our choices where the source is silent or not followed, and flags for alternatives:

    per worker     batch normalization over 256 images on 8 GPUs; the source's 4 GPUs have 512 each:
                   `--batch.0.per-worker-batch`
    mixed labels   every class that a mixed image contains is a target of 1 (section 3.1), if its share exceeds 0.2, the
                   threshold in training commands of timm: `--optimizer.target-threshold 0.5`
    smoothing      0.1, as in the table; the threshold leaves no trace of it: `--optimizer.target-threshold None`
    switching      mixup or CutMix with probability 1/2, timm's default
    gradients      clipped to norm 1, the default of timm's LAMB: `--optimizer.clip-norm 5`
    epsilon        1e-6 in LAMB, timm's default: `--optimizer.adam-eps 1e-8`
    warm-up        5 epochs from 1e-4; the end of the cosine is 1e-6, both defaults of timm: `--schedule.start 0`
    end            with the cosine; timm trains 10 more epochs at 1e-6, the default of `--cooldown-epochs` then
    rate           changes every step, and the cosine begins at the end of the warm-up; timm's changes every epoch and counts
                   from epoch 0, so that the rate here is 1.3 % higher halfway
    repetition     3 copies of an image in a batch, and every image in 3 epochs; timm shuffles anew for each epoch, which sees a
                   random third of the images
    interpolation  of crops and operations at random bilinear or bicubic, timm's default: `--augment.crop-interpolation bicubic`
    precision      bfloat16 compute; the source has mixed precision: `--model.dtype float32`
"""

from jaxdp.config import Augment, Config, Data, Model, Optimizer, Phase, Schedule


def config() -> Config:
    return Config(
        name="imagenet_rsb_a1",
        epochs=600.0,
        data=Data(
            source="imagenet2012",
            image_size=224,
            eval_crop=0.95,
            eval_interpolation="bicubic",
            augmentation="random_resized_crop",
            auto_augment="rand_augment_increasing",
            repeats=3,
            mix="mixup_or_cutmix",
            mix_alpha=0.2,
        ),
        augment=Augment(crop_interpolation="random", magnitude=7.0),
        model=Model(depth=50, classes=1000, dtype="bfloat16", drop_path=0.05),
        batch=(Phase(global_batch=2048, per_worker_batch=256),),
        optimizer=Optimizer(
            name="lamb",
            weight_decay=0.01,
            adam_eps=1e-6,
            clip_norm=1.0,
            loss="binary",
            target_threshold=0.2,
            label_smoothing=0.1,
        ),
        schedule=Schedule(name="cosine", learning_rate=0.005, warmup_epochs=5.0, start=1e-4, end=1e-6),
    )
