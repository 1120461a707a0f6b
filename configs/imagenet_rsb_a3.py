"""ResNet strikes back, procedure A3: 78.1 % in 100 epochs of 160x160 images.

    python train.py --config imagenet_rsb_a3
    jaxdp plan --config imagenet_rsb_a3 --devices 8

Source: Wightman, Touvron, Jegou, "ResNet strikes back: An improved training procedure in timm", arXiv 2110.00476, Table 2.
Published: 78.1 % top-1 after 100 epochs, 15 hours on 4 V100 GPUs.
Our choices beside `jaxdp.published.rsb`, and flags for alternatives:

    rate           8.3 % higher than timm's halfway, whose cosine counts from epoch 0
"""

from jaxdp.config import Config
from jaxdp.published import rsb


def config() -> Config:
    return rsb(
        "imagenet_rsb_a3",
        epochs=100.0,
        learning_rate=0.008,
        weight_decay=0.02,
        mix_alpha=0.1,
        magnitude=6.0,
        image_size=160,
        eval_size=224,
    )
