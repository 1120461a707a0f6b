"""Both sides of each bound between sections of a config."""

from dataclasses import replace

import pytest

from jaxdp.config import Config, Phase
from jaxdp.errors import ConfigError
from jaxdp.recipes import load_config
from jaxdp.validation import check_classes, check_targets, validate, with_fields

FOLDER = {"data.source": "folder", "data.directory": "/images"}
LINEAR = {"model.name": "normalized_linear"}
CROPS = {"data.augmentation": "random_resized_crop"}


def ending(*epochs: float | None) -> dict[str, tuple[Phase, ...]]:
    """Phases that end at these epochs."""
    return {"batch": tuple(Phase(until_epoch=epoch) for epoch in epochs)}


def batches(**fields) -> dict[str, tuple[Phase, ...]]:
    return {"batch": (Phase(**fields),)}


def checked(fields: dict) -> Config:
    """A valid config of 90 epochs, 10 classes and a warm-up of 5 epochs with these fields."""
    top = {name: value for name, value in fields.items() if "." not in name}
    return validate(with_fields(replace(Config(), **top), {name: value for name, value in fields.items() if "." in name}))


@pytest.mark.parametrize(
    ("fields", "also", "refused"),
    [
        # also: what makes the config valid; refused: the field that is named without it
        (ending(None, None), ending(0.5, 90.0), "batch.0.until_epoch"),
        (ending(90.0, None), ending(89.99, None), "batch.0.until_epoch"),
        (ending(30.0, 30.0, None), ending(30.0, 30.01, None), "batch.1.until_epoch"),
        (ending(30.0, 89.0), ending(30.0, 90.0), "batch.1.until_epoch"),
        (ending(30.0, 91.0), ending(91.0) | {"epochs": 91.0}, "batch.1.until_epoch"),
        (batches(global_batch=9, per_worker_batch=4), batches(global_batch=8, per_worker_batch=4), "batch.0.per_worker_batch"),
        (batches(global_batch=2, per_worker_batch=4), batches(global_batch=4, per_worker_batch=4), "batch.0.per_worker_batch"),
        ({"data.stored_size": 40}, {"data.stored_size": 32}, "data.stored_size"),
        ({"data.stored_size": 40}, {"data.augmentation": "paper"}, "data.stored_size"),
        ({"data.stored_size": 32} | batches(image_size=24), {"data.stored_size": None}, "batch.0.image_size"),
        ({"data.stored_size": 32} | batches(image_size=24), {"data.augmentation": "paper"}, "batch.0.image_size"),
        (FOLDER | CROPS | {"data.stored_size": 40}, {"data.source": "digits", "data.directory": None}, "data.stored_size"),
        (CROPS | {"augment.crop_interpolation": "bicubic"}, FOLDER, "augment.crop_interpolation"),
        (
            {"data.auto_augment": "rand_augment", "augment.magnitude": 6.5},
            {"data.auto_augment": "rand_augment_increasing"},
            "augment.magnitude",
        ),
        (
            {"data.auto_augment": "rand_augment_increasing", "augment.magnitude": 10.01},
            {"augment.magnitude": 10.0},
            "augment.magnitude",
        ),
        (
            {"data.auto_augment": "rand_augment_increasing", "augment.magnitude": 11.0},
            {"data.auto_augment": "rand_augment"},
            "augment.magnitude",
        ),
        ({"optimizer.class_weights": (1.0,) * 9}, {"optimizer.class_weights": (1.0,) * 10}, "optimizer.class_weights"),
        ({"optimizer.class_weights": (1.0,) * 11}, {"optimizer.class_weights": "balanced"}, "optimizer.class_weights"),
        (
            FOLDER | {"optimizer.class_weights": (1.0,) * 9, "model.classes": 8},
            {"model.classes": None},
            "optimizer.class_weights",
        ),
        (
            {"optimizer.class_weights": (*(1.0,) * 9, 0.0)},
            {"optimizer.class_weights": (*(1.0,) * 9, 1e-6)},
            "optimizer.class_weights",
        ),
        (FOLDER | {"stop.metric": "eval_top5", "model.classes": 5}, {"model.classes": 6}, "stop.metric"),
        (FOLDER | {"stop.metric": "eval_top5", "model.classes": 5}, {"model.classes": None}, "stop.metric"),
        ({"model.drop_path": 0.1, "finetune.frozen_stages": 5}, {"finetune.frozen_stages": 4}, "model.drop_path"),
        ({"model.drop_path": 0.1, "finetune.frozen_stages": 5}, {"model.drop_path": 0.0}, "model.drop_path"),
        ({"model.dtype": "float16"}, {"optimizer.loss_scale": 128.0}, "model.dtype"),
        ({"reduce.wire_dtype": "float16"}, {"optimizer.loss_scale": "dynamic"}, "reduce.wire_dtype"),
        ({"reduce.wire_dtype": "float16"}, {"reduce.wire_dtype": "bfloat16"}, "reduce.wire_dtype"),
        ({"schedule.from_epoch": 90.0}, {"schedule.from_epoch": 84.0}, "schedule.from_epoch"),
        ({"schedule.warmup_epochs": 90.0}, {"schedule.warmup_epochs": 89.9}, "schedule.warmup_epochs"),
        ({"schedule.from_epoch": 85.0}, {"schedule.from_epoch": 84.9}, "schedule.warmup_epochs"),
        ({"schedule.from_epoch": 85.0}, {"schedule.warmup_epochs": 4.9}, "schedule.warmup_epochs"),
        (
            {"schedule.name": "goyal", "schedule.from_epoch": 60.0, "schedule.boundaries": (10.0, 30.0)},
            {"schedule.boundaries": (10.0, 29.9)},
            "schedule.boundaries",
        ),
        ({"finetune.weights": "gs://bucket/w"}, {"finetune.weights": "w"}, "finetune.weights"),
        ({"finetune.unfreeze_epoch": 1.0}, {"finetune.frozen_stages": 1}, "finetune.unfreeze_epoch"),
        (LINEAR | {"finetune.frozen_stages": 1}, {"finetune.frozen_stages": 0}, "finetune.frozen_stages"),
        ({"data.source": "folder"}, {"data.directory": "/images"}, "data.directory"),
        ({"data.train_split": "fit", "data.eval_split": "tast"}, {"data.eval_split": "test"}, "data.eval_split"),
        ({"data.train_split": "fits"}, {"data.train_split": "fit"}, "data.train_split"),
        ({"data.eval_split": "validation"}, {"data.train_split": "fit"}, "data.eval_split"),
        ({"model.classes": 11}, {"model.classes": 10}, "model.classes"),
        ({"reduce.strategy": "ring", "reduce.update": "sharded"}, {"reduce.strategy": "torus"}, "reduce.update"),
    ],
)
def test_relation_is_refused_by_its_field_and_accepted_just_inside(normalized_linear, fields, also, refused):
    checked(fields | also)
    with pytest.raises(ConfigError) as error:
        checked(fields)
    assert error.value.field == refused


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        (batches(global_batch=96, per_worker_batch=36), "--batch.0.per-worker-batch 32, or --batch.0.global-batch 108"),
        (batches(global_batch=90, per_worker_batch=8), "--batch.0.per-worker-batch 9, or --batch.0.global-batch 88"),
        (batches(global_batch=12, per_worker_batch=5), "--batch.0.per-worker-batch 4, or --batch.0.global-batch 10"),
        (batches(global_batch=7, per_worker_batch=5), "--batch.0.per-worker-batch 7, or --batch.0.global-batch 5"),
        (batches(global_batch=2, per_worker_batch=5), "--batch.0.per-worker-batch 2, or --batch.0.global-batch 5"),
        ({"schedule.from_epoch": 88.0}, "--schedule.warmup-epochs 0.1111, or more --epochs"),
        (
            {"schedule.name": "goyal", "schedule.from_epoch": 60.0, "schedule.boundaries": (30.0, 60.0)},
            "--schedule.boundaries 10 20, or more --epochs",
        ),
        ({"data.auto_augment": "rand_augment", "augment.magnitude": 6.6}, "7"),
    ],
)
def test_hint_gives_values_that_are_accepted(fields, hint):
    with pytest.raises(ConfigError) as error:
        checked(fields)
    assert error.value.hint == f"use {hint}"


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_threshold_lies_between_the_targets_of_other_classes_and_the_label(smoothing):
    """The targets of 4 classes: smoothing / 4, and 1 - smoothing more for the label."""
    others, own = smoothing / 4, 1 - smoothing + smoothing / 4
    config = with_fields(Config(), {"model.classes": 4, "optimizer.label_smoothing": smoothing})
    for threshold, accepted in ((others, not smoothing), (others + 1e-9, True), (own - 1e-9, True), (own, False)):
        fields = {"optimizer.target_threshold": threshold}
        if accepted:
            check_targets(with_fields(config, fields))
        else:
            with pytest.raises(ConfigError, match="all targets are"):
                check_targets(with_fields(config, fields))


def test_number_of_classes_is_checked_where_both_are_known():
    config = with_fields(Config(), FOLDER)
    for classes, of_data in ((None, 7), (7, 7), (7, None)):
        check_classes(with_fields(config, {"model.classes": classes}), of_data)
    with pytest.raises(ConfigError, match=r"data.source='folder' has 7 classes; omit it, or use 7$"):
        check_classes(with_fields(config, {"model.classes": 8}), 7)
    with pytest.raises(ConfigError, match=r"data.source='digits' has 1 class; omit it, or use 1 \(data sets given in Python: "):
        check_classes(with_fields(Config(), {"model.classes": 8}), 1)


def test_phase_that_ends_after_the_run_says_how_to_scale_it():
    for flags, hint in (([], "in Python use load_config"), (["--no-scale-schedule"], "omit --no-scale-schedule")):
        config = load_config("digits", flags)
        with pytest.raises(ConfigError, match=f"^batch.0.until_epoch=.*: phase 0 must end before the run .*{hint}"):
            validate(replace(config, epochs=config.batch[0].until_epoch))
