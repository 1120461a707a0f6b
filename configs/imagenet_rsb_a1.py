"""ResNet strikes back, procedure A1: 80.4 % in 600 epochs.

    python train.py --config imagenet_rsb_a1
    jaxdp plan --config imagenet_rsb_a1 --devices 8

Source: Wightman, Touvron, Jegou, "ResNet strikes back: An improved training procedure in timm", arXiv 2110.00476, Table 2.
Published: 80.4 % top-1 after 600 epochs, 110 hours on 4 V100 GPUs.
Our choices beside `jaxdp.published.rsb`, and flags for alternatives:

    smoothing      0.1, as in the table; the threshold leaves no trace of it: `--optimizer.target-threshold None`
    rate           1.3 % higher than timm's halfway, whose cosine counts from epoch 0
    repetition     3 copies of an image in a batch, and every image in 3 epochs; timm shuffles anew for each epoch, which sees a
                   random third of the images
"""

from jaxdp.config import Config
from jaxdp.published import rsb


def config() -> Config:
    return rsb(
        "imagenet_rsb_a1",
        epochs=600.0,
        learning_rate=0.005,
        weight_decay=0.01,
        mix_alpha=0.2,
        magnitude=7.0,
        drop_path=0.05,
        label_smoothing=0.1,
        repeats=3,
    )
