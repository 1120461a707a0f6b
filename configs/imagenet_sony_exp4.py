"""Experiment 4 of the paper: configuration A, four batch sizes from 34,816 to 121,856.

    python train.py --config imagenet_sony_exp4
    jaxdp plan --config imagenet_sony_exp4 --devices 8

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233v2, Tables 3 to 5.
Published: 75.23 % top-1 in 129 s, 4,096 V100 GPUs on a 64x64 torus.
Our choices beside `jaxdp.published.mikami`, and flags for alternatives:

    smoothing      0.1; Table 3 has a tick and no value, and the text says none: `--optimizer.label-smoothing 0`
    workers        4,352 with 16 images from epoch 30 to 45, more than the 4,096 GPUs: some GPUs had two micro-batches. Here
                   all used devices have equally many workers. As 2,176 with 32 images: `--batch.1.per-worker-batch 32`
"""

from jaxdp.config import Config, Phase
from jaxdp.published import CONFIGURATION_A, mikami


def config() -> Config:
    batch = (
        Phase(global_batch=2176 * 16, per_worker_batch=16, until_epoch=30.0),
        Phase(global_batch=4352 * 16, per_worker_batch=16, until_epoch=45.0),
        Phase(global_batch=2720 * 32, per_worker_batch=32, until_epoch=75.0),
        Phase(global_batch=3808 * 32, per_worker_batch=32),
    )
    return mikami("imagenet_sony_exp4", batch=batch, schedule=CONFIGURATION_A, label_smoothing=0.1)
