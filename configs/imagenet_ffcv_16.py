"""FFCV's ResNet-50 in 16 epochs: small images, growing at three quarters of the run, BlurPool.

    python train.py --config imagenet_ffcv_16
    python train.py --config imagenet_ffcv_16 --name imagenet_ffcv_88 --epochs 88 --batch.0.until-epoch 71 \\
        --schedule.warmup-epochs 2
    jaxdp plan --config imagenet_ffcv_16 --devices 8

Source: Leclerc et al., "FFCV: Accelerating Training by Removing Data Bottlenecks", arXiv 2306.12517; libffcv/ffcv-imagenet,
rn50_configs/rn50_16_epochs.yaml and train_imagenet.py.
Published: 73.8 % top-1 after 16 epochs in 15 minutes, 78.4 % after 88 in 77 minutes, 8 A100 GPUs, both averaged over an image
and its mirror image.
Our choices where the source is silent or not followed, and flags for alternatives:

    batch          512 images on each of 8 GPUs, as the source's loader divides the data
    image size     160, and 192 from epoch 12 on, where the source's ramp from epoch 11 to 13 rounds to 192. In its 88 epochs,
                   with a ramp from 65 to 76, that is epoch 71
    peak           at epoch 2 in any length, so the command for 88 epochs sets the warm-up
    weight decay   not on biases and normalization; the source decays the classifier's bias and the normalization of shortcuts
    images         as ImageNet's files; the source resizes them to at most 500 pixels a side and compresses half of them anew
    evaluation     of 256x256 images; the published accuracies average the image and its mirror image, which jaxdp does not
    initialization zero scale in the last batch normalization of each block; the source starts from 1; there is no flag for it
    precision      bfloat16 compute; the source has float16 with loss scaling:
                   `--model.dtype float16 --optimizer.loss-scale dynamic`
"""

from jaxdp.config import Augment, Config, Data, Model, Optimizer, Phase, Schedule


def config() -> Config:
    return Config(
        name="imagenet_ffcv_16",
        epochs=16.0,
        data=Data(
            source="imagenet2012",
            image_size=192,
            eval_size=256,
            eval_resize=0.875,
            eval_interpolation="area",
            augmentation="random_resized_crop",
        ),
        augment=Augment(crop_interpolation="area"),
        model=Model(depth=50, classes=1000, dtype="bfloat16", blur_pool="convolutions"),
        batch=(
            Phase(global_batch=4096, per_worker_batch=512, until_epoch=12.0, image_size=160),
            Phase(global_batch=4096, per_worker_batch=512),
        ),
        optimizer=Optimizer(name="sgd", momentum=0.9, weight_decay=1e-4, label_smoothing=0.1),
        schedule=Schedule(name="polynomial", learning_rate=1.7, warmup_epochs=2.0, start=1.7e-4, power=1.0),
    )
