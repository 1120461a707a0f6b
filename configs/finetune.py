"""A ResNet-50 that others have trained on ImageNet, fine-tuned on a folder of images.

    python train.py --config finetune --data.source folder --data.directory D --model.classes N --finetune.weights FILE

D/train/CLASS/ and D/val/CLASS/ hold the images of N classes; FILE is of torchvision, timm or jaxdp, in safetensors. Without
these flags it learns the handwritten digits from random weights, for rehearsals.

Source: none; every value is a usual choice of ours and not tuned:

    rates          0.01 for a batch of 64, ten times that for the new classifier: `--finetune.head-multiplier 10`
    frozen         nothing; `--finetune.weights FILE --finetune.frozen-stages 2` keeps the first layers of FILE
    augmentation   random resized crop of a quarter of the image or more, and mirroring
"""

from jaxdp.config import Augment, Config, Data, Finetune, Model, Optimizer, Phase, Schedule


def config() -> Config:
    return Config(
        name="finetune",
        epochs=15.0,
        data=Data(source="digits", image_size=224, augmentation="random_resized_crop"),
        augment=Augment(min_area=0.25),
        model=Model(depth=50, classes=10),
        batch=(Phase(global_batch=64),),
        optimizer=Optimizer(name="sgd", momentum=0.9, nesterov=True, weight_decay=1e-4, label_smoothing=0.1),
        schedule=Schedule(name="cosine", learning_rate=0.01, warmup_epochs=1.0),
        finetune=Finetune(head_multiplier=10.0),
    )
