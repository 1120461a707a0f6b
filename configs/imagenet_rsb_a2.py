"""ResNet strikes back, procedure A2: 79.8 % in 300 epochs.

    python train.py --config imagenet_rsb_a2
    jaxdp plan --config imagenet_rsb_a2 --devices 8

Source: Wightman, Touvron, Jegou, "ResNet strikes back: An improved training procedure in timm", arXiv 2110.00476, Table 2.
Published: 79.8 % top-1 after 300 epochs, 55 hours on 4 V100 GPUs.
Our choices beside `jaxdp.published.rsb`, and flags for alternatives:

    rate           2.7 % higher than timm's halfway, whose cosine counts from epoch 0
    repetition     3 copies of an image in a batch, and every image in 3 epochs; timm shuffles anew for each epoch, which sees a
                   random third of the images
"""

from jaxdp.config import Config
from jaxdp.published import rsb


def config() -> Config:
    return rsb(
        "imagenet_rsb_a2",
        epochs=300.0,
        learning_rate=0.005,
        weight_decay=0.02,
        mix_alpha=0.1,
        magnitude=7.0,
        drop_path=0.05,
        repeats=3,
    )
