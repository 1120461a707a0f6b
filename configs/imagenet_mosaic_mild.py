"""MosaicML's mild recipe for ResNet-50: binary loss, BlurPool, averaged weights, images that grow from 88 to 176.

    python train.py --config imagenet_mosaic_mild
    jaxdp plan --config imagenet_mosaic_mild --devices 8

Source: MosaicML, "Mosaic ResNet" (mosaicml/examples, blogs/resnet: resnet50_mild.yaml and README).
Published: 76.19 % top-1 after 28.8 epochs (`--epochs 28.8`); the first versions of the file have 32.4 epochs (without an
accuracy), and the last version 90.
Our choices where the source is silent or not followed, and flags for alternatives:

    weight decay   3.05e-5, added to the gradient. The source decays weights by 5e-4 of themselves at the peak rate 2.048, apart
                   from the momentum 0.875: 5e-4 = 2.048 x 3.05e-5 / (1 - 0.875). Not on biases and normalization
    image size     steps of 16 pixels; the source's are of 4, which would need 23 programs. It shrinks crops of 176x176 by the
                   nearest pixel; here the crop itself has the size, resized by area
    images         as ImageNet's files; the source's results are of FFCV's format, which resizes and compresses them anew
    warm-up        8 epochs in any length, as in the source: `--epochs 28.8 --schedule.warmup-epochs 8`
    averaging      every step, with the source's half-life of 100 steps; it averages every 20: `--optimizer.average-decay 0.999`
    initialization as in Goyal et al.: He by fan-out, N(0, 0.01) in the classifier, scales of 1, and zero in the last batch
                   normalization of each block. The source uses He by fan-in, in the classifier too, and draws scales from
                   [0, 1); there is no flag for it
    precision      bfloat16 compute; the source has mixed precision: `--model.dtype float32`
"""

from itertools import pairwise

from jaxdp.config import Augment, Config, Data, Model, Optimizer, Phase, Schedule

EPOCHS, SMALL, LARGE, STEP = 32.4, 88, 176, 16
GROWS_FROM, GROWS_UNTIL = 0.4, 0.8  # shares of the run


def phases() -> tuple[Phase, ...]:
    """Each size, until a line from the smallest to the largest is nearer to the next."""
    sizes = [*range(SMALL, LARGE, STEP), LARGE]
    middles = [(small + large) / 2 for small, large in pairwise(sizes)]
    shares = [GROWS_FROM + (GROWS_UNTIL - GROWS_FROM) * (middle - SMALL) / (LARGE - SMALL) for middle in middles]
    ends = [round(EPOCHS * share, 2) for share in shares]
    return tuple(
        Phase(global_batch=2048, per_worker_batch=256, until_epoch=end, image_size=size)
        for size, end in zip(sizes, [*ends, None], strict=True)
    )


def config() -> Config:
    return Config(
        name="imagenet_mosaic_mild",
        epochs=EPOCHS,
        data=Data(
            source="imagenet2012",
            image_size=LARGE,
            eval_size=224,
            eval_resize=232,
            eval_interpolation="area",
            augmentation="random_resized_crop",
        ),
        augment=Augment(crop_interpolation="area"),
        model=Model(
            depth=50, classes=1000, dtype="bfloat16", blur_pool="convolutions_and_pool", classifier_bias="class_frequency"
        ),
        batch=phases(),
        optimizer=Optimizer(
            name="sgd",
            momentum=0.875,
            weight_decay=5e-4 * (1 - 0.875) / 2.048,
            loss="binary_sum",
            label_smoothing=0.08,
            average_decay=0.5**0.01,
        ),
        schedule=Schedule(name="cosine", learning_rate=2.048, warmup_epochs=8.0),
    )
