"""MLPerf training: ResNet-50 on ImageNet with 65,536 images per step, LARS, to 75.9 %.

    python train.py --config imagenet_mlperf_65536
    jaxdp plan --config imagenet_mlperf_65536 --devices 8

Source: MLPerf training v4.0, reference convergence points for batch 65,536 (LARS, polynomial decay of power 2 to 1e-4;
mlcommons/logging, training_4.0.0/rcps_resnet.json); its reference code (mlcommons/training, resnet-tf2).
Published: 75.9 % top-1 after 84.5 epochs on average; the reference fixes no hardware.
Our choices beside `jaxdp.published.mlperf`, and flags for alternatives:

    length         89 epochs: the reference's decay has 1,133 steps after the warm-up. The reference stops
                   at 75.9 %; jaxdp trains to the end: `--epochs`
    per worker     batch normalization over 128 images, the reference's `model_bn_span`: `--batch.0.per-worker-batch`
"""

from jaxdp.config import Config, Phase
from jaxdp.published import mlperf


def config() -> Config:
    return mlperf(
        "imagenet_mlperf_65536",
        epochs=89.0,
        batch=Phase(global_batch=65536, per_worker_batch=128),
        learning_rate=24.699,
        warmup=31.0,
        weight_decay=0.0001,
        momentum=0.951807,
    )
