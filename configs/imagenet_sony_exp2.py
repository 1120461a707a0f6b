"""Experiment 2 of the paper: configuration B, label smoothing, 55,296 images a step throughout.

    python train.py --config imagenet_sony_exp2
    jaxdp plan --config imagenet_sony_exp2 --devices 8

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233v2, Tables 3 to 5.
Published: 75.29 % top-1 in 122 s, 3,456 V100 GPUs on a 48x72 torus.
Our choices beside `jaxdp.published.mikami`, and flags for alternatives:

    smoothing      0.1; Table 3 has a tick and no value: `--optimizer.label-smoothing 0.05`
"""

from jaxdp.config import Config, Phase
from jaxdp.published import CONFIGURATION_B, mikami


def config() -> Config:
    batch = (
        Phase(global_batch=3456 * 16, per_worker_batch=16, until_epoch=30.0),
        Phase(global_batch=1728 * 32, per_worker_batch=32),
    )
    return mikami("imagenet_sony_exp2", batch=batch, schedule=CONFIGURATION_B, label_smoothing=0.1, momentum_rule="noise_scale")
