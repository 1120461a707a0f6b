"""torchvision's second recipe for ResNet-50: TrivialAugment, repeated augmentation, averaged weights, 80.86 % in 600 epochs.

    python train.py --config imagenet_torchvision_v2
    jaxdp plan --config imagenet_torchvision_v2 --devices 8

Source: torchvision, ResNet50_Weights.IMAGENET1K_V2 and the command of its recipe (pytorch/vision, issue 3995, and
references/classification/train.py).
Published: 80.858 % top-1, trained on 8 GPUs of 128 images each.
Our choices where the source is silent or not followed, and flags for alternatives:

    weight decay   2e-5, not on biases and normalization; the source decays the classifier's bias too
    averaging      every step; the source averages every 32 steps, with a decay of 1 - 1024 x 32 / 600 x 2e-5, whose 32nd root
                   is the decay here: `--optimizer.average-decay 0.9999`
    mixing         mixup with alpha 0.2 or CutMix with 1.0, for each worker's batch
    rate           changes every step; the source's changes every epoch
    repetition     4 copies of an image in a batch, and every image in 4 epochs; the source shuffles anew for each epoch, which
                   sees a random quarter of the images
    initialization zero scale in the last batch normalization of each block; the source starts from 1; there is no flag for it
    precision      bfloat16 compute; the source has mixed precision: `--model.dtype float32`
"""

from jaxdp.config import Augment, Config, Data, Model, Optimizer, Phase, Schedule

AVERAGE_DECAY = (1 - 1024 * 32 / 600 * 2e-5) ** (1 / 32)


def config() -> Config:
    return Config(
        name="imagenet_torchvision_v2",
        epochs=600.0,
        data=Data(
            source="imagenet2012",
            image_size=176,
            eval_size=224,
            eval_resize=232,
            augmentation="random_resized_crop",
            auto_augment="trivial_augment",
            repeats=4,
            mix="mixup_or_cutmix",
            mix_alpha=0.2,
        ),
        augment=Augment(crop_interpolation="bilinear", operation_interpolation="bilinear", erase_probability=0.1),
        model=Model(depth=50, classes=1000, dtype="bfloat16"),
        batch=(Phase(global_batch=1024, per_worker_batch=128),),
        optimizer=Optimizer(name="sgd", momentum=0.9, weight_decay=2e-5, label_smoothing=0.1, average_decay=AVERAGE_DECAY),
        schedule=Schedule(name="cosine", learning_rate=0.5, warmup_epochs=5.0, start=0.005),
    )
