"""MLPerf training: ResNet-50 on ImageNet with 3,264 images per step, LARS, to 75.9 %.

    python train.py --config imagenet_mlperf_3264
    jaxdp plan --config imagenet_mlperf_3264 --devices 8

Source: MLPerf training v4.0, reference convergence points for batch 3,264 (LARS, polynomial decay of power 2 to 1e-4;
mlcommons/logging, training_4.0.0/rcps_resnet.json); its reference code (mlcommons/training, resnet-tf2).
Published: 75.9 % top-1 after 35.15 epochs on average; the reference fixes no hardware.
Our choices beside `jaxdp.published.mlperf`, and flags for alternatives:

    length         37 epochs: the reference's decay has 14,523 steps, which include the warm-up. The reference stops
                   at 75.9 %; jaxdp trains to the end: `--epochs`
    per worker     batch normalization over 204 images, the reference's `model_bn_span`: `--batch.0.per-worker-batch`
"""

from jaxdp.config import Config, Phase
from jaxdp.published import mlperf


def config() -> Config:
    return mlperf(
        "imagenet_mlperf_3264",
        epochs=37.0,
        batch=Phase(global_batch=3264, per_worker_batch=204),
        learning_rate=10.5,
        warmup=2.0,
        weight_decay=5e-05,
        momentum=0.9,
    )
