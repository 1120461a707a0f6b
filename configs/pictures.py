"""A ResNet-18 on a small set of your own images, with or without pretrained weights.

    python train.py --config pictures --data.source folder --data.directory D --data.holdout 0.1

D/CLASS/ contains the images of each class; if D has train/ and val/ with such folders, omit --data.holdout. Without these flags
the recipe trains on the handwritten digits, as a rehearsal.

Source: none; the values are our choice:

    batch          16: 300 images give 338 steps
    size           128x128: a third of the work of 224x224
    weights        --finetune.weights FILE of a ResNet-18; for a ResNet-50 also --model.depth 50
"""

from jaxdp.config import Augment, Config, Data, Model, Optimizer, Phase, Schedule


def config() -> Config:
    return Config(
        name="pictures",
        epochs=20.0,
        data=Data(source="digits", image_size=128, augmentation="random_resized_crop"),
        augment=Augment(min_area=0.35),
        model=Model(depth=18, classes=10, norm="synchronized"),
        batch=(Phase(global_batch=16),),
        optimizer=Optimizer(name="adamw", weight_decay=0.05, label_smoothing=0.1),
        schedule=Schedule(name="cosine", learning_rate=5e-4, warmup_epochs=2.0),
    )
