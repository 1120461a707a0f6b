"""MLPerf training: ResNet-50 on ImageNet with 3,264 images per step, LARS, to 75.9 %.

    python train.py --config imagenet_mlperf_3264
    jaxdp plan --config imagenet_mlperf_3264 --devices 8

Source: MLPerf training v4.0, reference convergence points for batch 3,264 (LARS, polynomial decay of power 2 to 1e-4;
mlcommons/logging, training_4.0.0/rcps_resnet.json); its reference code (mlcommons/training, resnet-tf2).
Published: 75.9 % top-1 after 35.15 epochs on average; the reference fixes no hardware.
Our reading of the source, our choices where it is silent or not followed, and flags for alternatives:

    length         37 epochs: the reference's decay has 14,523 steps, which include the warm-up. The reference stops
                   at 75.9 %; jaxdp trains to the end: `--epochs`
    per worker     batch normalization over 204 images, the reference's `model_bn_span`: `--batch.0.per-worker-batch`
    initialization as in Goyal et al.: He by fan-out, zero scale in the last batch normalization of each block.
                   The reference uses He by fan-in and scales of 1; there is no flag for it
    precision      bfloat16 compute, float32 gradients on the wire: `--model.dtype float32`
    augmentation   random resized crop of 5 to 100 % and flip, without the reference's bounding boxes. Area and logarithm of the
                   ratio, 3/4 to 4/3, are uniform; TensorFlow draws the height and the ratio, 0.75 to 1.33, uniformly
    evaluation     an antialiased filter; the reference resizes without one; there is no flag for it
"""

from jaxdp.config import Augment, Config, Data, Model, Optimizer, Phase, Schedule

MEAN = (123.68 / 255, 116.78 / 255, 103.94 / 255)
STD = (1 / 255,) * 3  # the reference does not divide by a standard deviation


def config() -> Config:
    return Config(
        name="imagenet_mlperf_3264",
        epochs=37.0,
        data=Data(source="imagenet2012", image_size=224, mean=MEAN, std=STD, augmentation="random_resized_crop"),
        augment=Augment(min_area=0.05),
        model=Model(depth=50, classes=1000, dtype="bfloat16"),
        batch=(Phase(global_batch=3264, per_worker_batch=204),),
        optimizer=Optimizer(name="lars", momentum=0.9, weight_decay=5e-05, eps=0.0, label_smoothing=0.1),
        schedule=Schedule(name="polynomial", learning_rate=10.5, warmup_epochs=2.0, end=1e-4, power=2.0),
    )
