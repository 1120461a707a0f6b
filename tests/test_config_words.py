"""Every fact of a config that a table, plot or model card writes as text, and none while it is off."""

import pytest

from jaxdp.config import Config, Optimizer
from jaxdp.config_words import evaluation_words, finetuning_words, optimizer_words, policy_words, training_labels
from jaxdp.validation import with_fields


def words_of(words, fields: dict) -> str:
    said = words(with_fields(Config(), fields))
    return "; ".join(said) if isinstance(said, list) else said


@pytest.mark.parametrize(
    ("words", "fields", "expected"),
    [
        (training_labels, {}, "plain labels"),
        (training_labels, {"optimizer.label_smoothing": 0.1}, "labels smoothed by 0.1"),
        (training_labels, {"optimizer.class_weights": "balanced"}, "weighted by class"),
        (
            training_labels,
            {"optimizer.label_smoothing": 0.1, "data.mix": "mixup_or_cutmix", "optimizer.target_threshold": 0.0},
            "labels smoothed by 0.1, labels mixed by mixup or cutmix, labels above 0 set to 1, others to 0",
        ),
        (evaluation_words, {}, "evaluated at 32x32 from a short side of 32, bilinear"),
        (
            evaluation_words,
            {"data.image_size": 224, "data.eval_resize": 256, "data.eval_interpolation": "area"},
            "evaluated at 224x224 from the central 0.875 of the short side, area",
        ),
        (
            evaluation_words,
            {"data.eval_size": 64, "data.eval_resize": 73, "data.mean": (0.5,) * 3, "data.std": (0.25, 0.25, 1.0)},
            "evaluated at 64x64 from a short side of 73, bilinear, mean 0.5 0.5 0.5, std 0.25 0.25 1",
        ),
        (policy_words, {}, ""),
        (policy_words, {"augment.crop_interpolation": "area"}, "crops antialiased (area)"),
        (
            policy_words,
            {"augment.crop_interpolation": "random", "augment.color_jitter": (0.4, 0.0, 0.2), "data.repeats": 2},
            "crops antialiased (bilinear or bicubic, at random); color jitter (brightness 0.4, saturation 0.2); "
            "each image 2 times a batch",
        ),
        (policy_words, {"data.auto_augment": "trivial_augment"}, "trivial augment"),
        (
            policy_words,
            {"data.auto_augment": "rand_augment", "augment.magnitude": 5.0, "augment.erase_probability": 0.25},
            "rand augment (magnitude 5.0); erasing (probability 0.25)",
        ),
        (finetuning_words, {}, "from random weights, nothing frozen"),
        (
            finetuning_words,
            {"finetune.digest": "0" * 16, "finetune.frozen_stages": 1},
            "from given parameters, the stem frozen",
        ),
        (
            finetuning_words,
            {"finetune.weights": "w", "finetune.digest": "0" * 16, "finetune.frozen_stages": 2},
            "from w, the stem and 1 stage frozen",
        ),
        (
            finetuning_words,
            {"finetune.frozen_stages": 1, "finetune.unfreeze_epoch": 2.5},
            "from random weights, the stem frozen until epoch 2.5",
        ),
        (
            finetuning_words,
            {"finetune.frozen_stages": 3, "finetune.layer_decay": 0.75},
            "from random weights, the stem and 2 stages frozen, learning rate times 0.75 for each layer below the classifier",
        ),
    ],
)
def test_words_name_what_is_on_and_nothing_else(words, fields, expected):
    assert words_of(words, fields) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": "sgd"}, "sgd, weight decay 0.0001"),
        ({"name": "sgd", "nesterov": True}, "sgd with Nesterov momentum, weight decay 0.0001"),
        ({}, "lars, adapt weights, eps 1e-06, trust coefficient 0.001, weight decay 0.0001"),
        (
            {"name": "sgd", "momentum_rule": "noise_scale", "clip_norm": 0.5, "average_decay": 0.0},
            "sgd, weight decay 0.0001, momentum 0.9 at batch 32768 with rule 'noise scale', gradients clipped to norm 0.5, "
            "evaluation of averaged parameters with decay 0",
        ),
        (
            {"name": "lamb", "average_decay": 0.9, "average_start": "warmup"},
            "lamb, beta2 0.999, weight decay 0.0001, evaluation of averaged parameters with decay 0.9, start warmup",
        ),
        ({"name": "my_rule", "momentum": 0.95}, "my_rule"),  # which of the fields it reads is not known
        ({"name": "my_rule", "trust_coefficient": None}, "my_rule, trust coefficient None"),
        ({"name": "my_rule", "beta2": 0.99, "weight_decay": 0.0}, "my_rule, beta2 0.99, weight decay 0"),
    ],
)
def test_optimizer_is_described_by_what_it_reads_and_what_is_set(fields, expected):
    assert optimizer_words(Optimizer(**fields)) == expected
