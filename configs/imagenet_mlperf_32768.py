"""MLPerf training: ResNet-50 on ImageNet with 32,768 images per step, LARS, to 75.9 %.

    python train.py --config imagenet_mlperf_32768
    jaxdp plan --config imagenet_mlperf_32768 --devices 8

Source: MLPerf training v4.0, reference convergence points for batch 32,768 (LARS, polynomial decay of power 2 to 1e-4;
mlcommons/logging, training_4.0.0/rcps_resnet.json); its reference code (mlcommons/training, resnet-tf2).
Published: 75.9 % top-1 after 56 epochs on average; the reference fixes no hardware.
Our choices beside `jaxdp.published.mlperf`, and flags for alternatives:

    length         58 epochs: the reference's decay has 2,267 steps, which include the warm-up. The reference stops
                   at 75.9 %; jaxdp trains to the end: `--epochs`
    per worker     batch normalization over 128 images, the reference's `model_bn_span`: `--batch.0.per-worker-batch`
"""

from jaxdp.config import Config, Phase
from jaxdp.published import mlperf


def config() -> Config:
    return mlperf(
        "imagenet_mlperf_32768",
        epochs=58.0,
        batch=Phase(global_batch=32768, per_worker_batch=128),
        learning_rate=21.2,
        warmup=16.0,
        weight_decay=2.5e-05,
        momentum=0.94,
    )
