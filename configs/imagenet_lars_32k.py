"""The paper's Reference: ResNet-50 on ImageNet at a constant batch of 32,768, LARS, no label smoothing.

    python train.py --config imagenet_lars_32k
    jaxdp plan --config imagenet_lars_32k --devices 8

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233v2, Tables 3 to 5.
Published: 75.40 % top-1 in 505 s, 1,024 V100 GPUs on a 32x32 torus.
Our choices beside `jaxdp.published.mikami`, and flags for alternatives:

    schedule       given as "You et al." only; here 0.2 to 29 over 5 epochs, then 29 (1 - epoch / 90)^2, momentum 0.9. Without
                   the drop at the end of the warm-up: `--schedule.name polynomial`; from 0: `--schedule.start 0`
"""

from jaxdp.config import Config, Phase, Schedule
from jaxdp.published import mikami


def config() -> Config:
    schedule = Schedule(name="sony_b", learning_rate=29.0, warmup_epochs=5.0, start=0.2, power=2.0)
    batch = (Phase(global_batch=32768, per_worker_batch=32),)
    return mikami("imagenet_lars_32k", batch=batch, schedule=schedule, label_smoothing=0.0)
