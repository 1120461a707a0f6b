"""Experiment 1 of the paper: configuration A, 34,816 images a step, then 69,632 from epoch 30 on.

    python train.py --config imagenet_sony_exp1
    jaxdp plan --config imagenet_sony_exp1 --devices 8

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233v2, Tables 3 to 5.
Published: 75.03 % top-1 in 224 s, 2,176 V100 GPUs on a 34x64 torus, with a previous version of their software.
Our choices where the source is silent or contradicts itself: see `jaxdp.published.mikami`.
"""

from jaxdp.config import Config, Phase
from jaxdp.published import CONFIGURATION_A, mikami


def config() -> Config:
    batch = (
        Phase(global_batch=2176 * 16, per_worker_batch=16, until_epoch=30.0),
        Phase(global_batch=2176 * 32, per_worker_batch=32),
    )
    return mikami("imagenet_sony_exp1", batch=batch, schedule=CONFIGURATION_A, label_smoothing=0.0)
