"""A ResNet-50 with ImageNet weights, fine-tuned on a folder of images.

    python train.py --config finetune --data.source folder --data.directory D --finetune.weights FILE

D/train/CLASS/ and D/val/CLASS/ contain the images of each class; FILE is a safetensors file of torchvision, timm or jaxdp.
Without these flags the recipe trains on the handwritten digits from random weights, as a rehearsal.

Source: none; the values are common choices, not tuned:

    rates          0.01 for a batch of 64; ten times that for the new classifier: `--optimizer.groups fc:rate=10`
    frozen         nothing; to freeze the first layers: `--finetune.weights FILE --finetune.frozen-stages 2`
    augmentation   random resized crop of a quarter of the image or more, and flip
"""

from jaxdp.config import Augment, Config, Data, Group, Model, Optimizer, Phase, Schedule


def config() -> Config:
    return Config(
        name="finetune",
        epochs=15.0,
        data=Data(source="digits", image_size=224, augmentation="random_resized_crop"),
        augment=Augment(min_area=0.25),
        model=Model(depth=50, classes=10),
        batch=(Phase(global_batch=64),),
        optimizer=Optimizer(
            name="sgd",
            momentum=0.9,
            nesterov=True,
            weight_decay=1e-4,
            label_smoothing=0.1,
            groups=(Group("fc", rate=10.0),),
        ),
        schedule=Schedule(name="cosine", learning_rate=0.01, warmup_epochs=1.0),
    )
