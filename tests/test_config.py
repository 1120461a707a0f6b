import dataclasses
import functools
import json
import math
import re

import numpy as np
import pytest

from jaxdp import validation
from jaxdp.config import (
    Adam,
    Augment,
    Config,
    Data,
    EveryOptimizer,
    Logging,
    Model,
    Phase,
    at_image_size,
    phase_image_size,
    skips_steps,
)
from jaxdp.errors import ConfigError
from jaxdp.recipes import load_config, scale_schedule
from jaxdp.validation import TABLES, changes, flatten, from_dict, from_json, to_json, validate, with_fields

TWO_PHASES = Config(batch=(Phase(until_epoch=3.0), Phase(global_batch=512)))


def with_value(path, value) -> str:
    """TWO_PHASES as JSON with one field changed."""
    tree = dataclasses.asdict(TWO_PHASES)
    *parents, last = path.split(".")
    part = tree
    for parent in parents:
        part = part[int(parent)] if parent.isdigit() else part[parent]
    part[last] = value
    return json.dumps(tree)


def test_from_json_of_to_json_returns_an_equal_config():
    assert from_json(to_json(TWO_PHASES)) == TWO_PHASES
    for tree in (dataclasses.asdict(TWO_PHASES), json.loads(to_json(TWO_PHASES))):
        assert from_dict(tree) == TWO_PHASES


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("epochs", "3", "epochs='3': must be a valid number"),
        ("epochs", -1, "epochs=-1: must be greater than 0"),
        ("model.clases", 3, "model.clases: unknown field; did you mean classes? choose from "),
        ("model.depth", 20, "model.depth=20: must be 18, 34, 50, 101 or 152"),
        ("batch.0.global_batch", 0, "batch.0.global_batch=0: must be greater than or equal to 1"),
        ("batch.0.until_epoch", None, "batch.0.until_epoch=None: required for all phases but the last"),
        ("epochs", 3.0, "batch.0.until_epoch=3.0: phase 0 must end before the run (epochs=3); lower it, or in Python use "),
        ("batch.1.per_worker_batch", 7, "batch.1.per_worker_batch=7: must divide the global batch 512; use --batch.1.per-wo"),
        ("schedule.boundaries", [3.0, 2.0], "schedule.boundaries=(3.0, 2.0): not used with schedule.name='cosine'"),
        ("data.directory", "/images", "data.directory='/images': not used with data.source='digits'; use --data.source fol"),
        ("batch", [], "batch=(): needs at least one phase"),
        ("epochs", 0, "epochs=0: must be greater than 0"),
        ("epochs", 1e-16, "epochs=1e-16: must be greater than or equal to 1e-15"),
        ("optimizer.momentum", 1.0, "optimizer.momentum=1.0: must be less than 1"),
        ("optimizer.momentum", 0.99999999, "optimizer.momentum=0.99999999: must be less than or equal to 0.9999999"),
        ("optimizer.weight_decay", 1e16, "optimizer.weight_decay=1e+16: must be less than or equal to 1e+15"),
        ("data.image_size", 5000, "data.image_size=5000: must be less than or equal to 4096"),
        ("batch.0.global_bath", 3, "batch.0.global_bath: unknown field; did you mean global_batch? choose from "),
        ("optimizer.loss_scale", "x", "optimizer.loss_scale='x': must be 'none' or 'dynamic'"),
        ("data.eval_resize", "x", "data.eval_resize='x': must be a valid "),  # an integer or a float
        (
            "data.mix_alpha",
            0.2,
            "data.mix_alpha=0.2: not used with data.mix='none'; use --data.mix mixup (or cutmix, mixup_or_cutmix), "
            "or omit data.mix_alpha (default: 1.0)",
        ),
        (
            "schedule.boundaries",
            [3.0],
            "schedule.boundaries=(3.0,): not used with schedule.name='cosine'; use --schedule.name goyal (or sony_b), "
            "or omit schedule.boundaries (default: empty)",
        ),
    ],
)
def test_from_json_with_an_invalid_value_raises_one_line_with_field_value_and_reason(path, value, message):
    with pytest.raises(ConfigError) as caught:
        from_json(with_value(path, value))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_section_with_two_records_that_define_the_same_field_is_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Lion(EveryOptimizer):
        beta2: float = 0.99

    with pytest.raises(TypeError, match="Optimizer has two fields beta2"):
        type("Optimizer", (Lion, Adam), {})


def test_validate_of_wrong_types_from_python_raises():
    with pytest.raises(ConfigError, match="epochs='many': must be a valid number"):
        validate(Config(epochs="many"))
    with pytest.raises(ConfigError, match=r"must be a jaxdp\.Config"):
        validate({"epochs": 3})
    with pytest.raises(ConfigError, match=r"^seed=.*3.*: must be a valid integer$"):
        validate(Config(seed=np.int64(3)))


def test_validate_turns_lists_into_tuples_and_whole_numbers_into_floats():
    config = validate(Config(epochs=7, batch=[Phase()], data=Data(mean=[0.5, 0.5, 0.5])))
    assert config == Config(epochs=7.0, data=Data(mean=(0.5, 0.5, 0.5)))
    assert isinstance(config.epochs, float)


def test_changes_lists_changed_fields_except_resume_safe_ones():
    other = dataclasses.replace(
        TWO_PHASES,
        seed=7,
        name="other",
        mesh=dataclasses.replace(TWO_PHASES.mesh, vertical=2),
        batch=(Phase(until_epoch=3.0), Phase(global_batch=256)),
    )
    assert changes(TWO_PHASES, other) == ["batch.1.global_batch: 512 -> 256", "seed: 0 -> 7"]
    assert changes(Config(), TWO_PHASES) == ["batch.0.until_epoch: None -> 3", "batch.1.global_batch: None -> 512"]


def test_changes_lists_the_epochs_without_the_schedule_that_they_scale():
    recipe = load_config("imagenet_sony_exp2")
    old, new = (scale_schedule(recipe, ["--epochs", epochs]) for epochs in ("0.3", "0.7"))
    old, new = dataclasses.replace(old, epochs=0.3), dataclasses.replace(new, epochs=0.1 * 7)
    assert changes(old, new) == ["epochs: 0.3 -> 0.7, which scales the schedule"]
    assert changes(old, dataclasses.replace(old, epochs=0.7)) == ["epochs: 0.3 -> 0.7"]
    schedule = dataclasses.replace(new.schedule, warmup_epochs=0.123456)
    listed = changes(old, dataclasses.replace(new, schedule=schedule))
    assert "schedule.warmup_epochs: " + f"{old.schedule.warmup_epochs:.4g} -> 0.1235" in listed
    without_end = dataclasses.replace(new, batch=(dataclasses.replace(new.batch[0], until_epoch=None), *new.batch[1:]))
    assert any(line.startswith("batch.0.until_epoch: ") for line in changes(old, without_end))
    for boundaries in ((6.0, 12.0, 15.0), ()):
        other = with_fields(new, {"schedule.boundaries": boundaries})
        assert any(line.startswith("schedule.boundaries: ") for line in changes(old, other))
    assert changes(Config(epochs=1.0), Config(epochs=1.000001)) == ["epochs: 1.0 -> 1.000001"]


ANOTHER = {"adapt": "all", "class_weights": "balanced", "target_threshold": 0.2, "magnitude": 5.0, "boundaries": (1.0, 2.0)}
ANOTHER |= {
    "train_split": "fit",
    "eval_split": "validation",
    "image_column": "photo",
    "label_column": ("breed",),
    "label_separator": ";",
}
ANOTHER |= {"eval_size": 64, "eval_resize": 64, "eval_interpolation": "bicubic"}
ANOTHER |= {"crop_interpolation": "bicubic", "operation_interpolation": "bilinear"}


def another_value(name, default):
    if isinstance(default, bool):
        return not default
    if name == "directory":
        return "/images"
    if default is None:
        return ANOTHER.get(name, 2)
    return ANOTHER.get(name) or (default / 2 or 0.25 if isinstance(default, float) else default + 1)


def reason_for(tree) -> str:
    try:
        from_json(json.dumps(tree))
    except ConfigError as error:
        return error.reason
    return ""


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.field)
def test_dependent_field_is_rejected_by_the_choices_that_ignore_it_and_by_no_other(table):
    section, field = table.field.split(".")
    for path in table.readers:
        part, name = path.split(".")
        for choice in [*table, *(["imagenette"] if table.other else [])]:
            tree = dataclasses.asdict(Config())
            tree[part][name] = another_value(name, tree[part][name])
            tree[section][field] = choice
            rejected = reason_for(tree) == f"not used with {table.field}={choice!r}"
            assert rejected == (path in table.ignored_fields(choice)), (path, choice)


# Least, default and largest value of every field that is a number. Defaults that others publish: momentum, beta2 and decay of
# batch statistics of PyTorch, least area of torchvision's crops, LARS of TensorFlow, and the widths and depth of ResNet-50.
LEAST, MOST, COUNT, FRACTION = 1e-15, 1e15, 2**31 - 1, 0.9999999
NUMBERS = {
    "seed": (0, 0, 2**32 - 1),
    "epochs": (LEAST, 90.0, MOST),
    "data.eval_size": (8, None, 4096),
    "data.eval_resize": (0.1, None, 65536),
    "data.threads": (1, None, 1024),
    "data.holdout": (0.0, 0.0, FRACTION),
    "data.train_examples": (1, 4096, COUNT),
    "data.eval_examples": (1, 1000, COUNT),
    "data.mix_alpha": (1e-3, 1.0, 1e3),
    "data.image_size": (8, 32, 4096),
    "data.stored_size": (8, None, 4096),
    "data.repeats": (1, 1, 64),
    "augment.min_area": (1e-6, 0.08, 1.0),
    "augment.magnitude": (0.0, None, 30.0),
    "augment.erase_probability": (0.0, 0.0, 1.0),
    "model.depth": (18, 50, 152),
    "model.width": (1, 64, 4096),
    "model.classes": (1, None, 1_000_000),
    "model.drop_path": (0.0, 0.0, FRACTION),
    "model.norm_momentum": (0.0, 0.9, FRACTION),
    "batch.0.global_batch": (1, 256, COUNT),
    "batch.0.until_epoch": (LEAST, None, MOST),
    "batch.0.per_worker_batch": (1, None, COUNT),
    "batch.0.image_size": (8, None, 4096),
    "optimizer.momentum": (0.0, 0.9, FRACTION),
    "optimizer.weight_decay": (0.0, 1e-4, MOST),
    "optimizer.trust_coefficient": (LEAST, 0.001, MOST),
    "optimizer.eps": (0.0, 1e-6, MOST),
    "optimizer.beta2": (0.0, 0.999, FRACTION),
    "optimizer.target_threshold": (0.0, None, FRACTION),
    "optimizer.label_smoothing": (0.0, 0.0, FRACTION),
    "optimizer.loss_scale": (2.0**-100, "none", 2.0**100),
    "optimizer.clip_norm": (LEAST, None, MOST),
    "optimizer.average_decay": (0.0, None, FRACTION),
    "schedule.learning_rate": (LEAST, 1.0, MOST),
    "schedule.warmup_epochs": (0.0, 5.0, MOST),
    "schedule.start": (0.0, 0.0, MOST),
    "schedule.end": (0.0, 0.0, MOST),
    "schedule.power": (LEAST, 2.0, MOST),
    "schedule.factor": (LEAST, 0.1, MOST),
    "schedule.from_epoch": (0.0, 0.0, MOST),
    "finetune.frozen_stages": (0, 0, 5),
    "finetune.unfreeze_epoch": (LEAST, None, MOST),
    "finetune.layer_decay": (LEAST, 1.0, 1.0),
    "mesh.vertical": (1, None, COUNT),
    "mesh.horizontal": (1, None, COUNT),
    "mesh.cpu_devices": (1, None, 1024),
    "reduce.bucket_bytes": (1, None, 2**60),
    "evaluation.every_epochs": (LEAST, 1.0, MOST),
    "stop.patience": (1, None, COUNT),
    "checkpoint.every_epochs": (LEAST, 1.0, MOST),
    "checkpoint.every_minutes": (math.ulp(0.0), 30.0, 1e6),
    "checkpoint.keep": (1, 2, COUNT),
    "guard.step_minutes": (math.ulp(0.0), 30.0, 1e6),
    "guard.silence_seconds": (3.0, 15.0, 86_400.0),
    "guard.audit_every_steps": (1, 500, COUNT),
    "guard.start_minutes": (math.ulp(0.0), 5.0, 10_080.0),
    "storage.cache_gigabytes": (LEAST, 100.0, MOST),
    "logging.every_steps": (1, None, COUNT),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_number_is_accepted_at_its_limits_and_refused_just_beyond(name, monkeypatch):
    """Limits of one field, without the relations to others."""
    monkeypatch.setattr(validation, "RELATIONS", ())
    monkeypatch.setattr(validation, "_check_dependent_fields", lambda config: None)
    least, default, most = NUMBERS[name]
    assert flatten(dataclasses.asdict(Config()))[name] == default

    def read(value) -> object:
        tree = dataclasses.asdict(Config())
        *parents, last = (int(part) if part.isdigit() else part for part in name.split("."))
        functools.reduce(lambda part, parent: part[parent], parents, tree)[last] = value
        return flatten(dataclasses.asdict(from_dict(tree)))[name]

    assert (read(least), read(most)) == (least, most)
    for limit, step in ((least, -1), (most, 1)):
        beyond = limit + step if isinstance(limit, int) else math.nextafter(limit, step * math.inf)
        with pytest.raises(ConfigError, match=rf"^{re.escape(name)}="):
            read(beyond)


def test_every_number_of_the_config_has_limits_in_the_table():
    numbers = {name for name, value in flatten(dataclasses.asdict(Config())).items() if type(value) in (int, float)}
    assert numbers - NUMBERS.keys() == set()


@pytest.mark.parametrize(
    ("name", "length", "least", "most"),
    [
        ("data.mean", 3, 0.0, 1.0),
        ("data.std", 3, 1e-3, 1.0),
        ("augment.color_jitter", 3, 0.0, 10.0),
        ("schedule.boundaries", 1, LEAST, MOST),
        ("optimizer.class_weights", 2, LEAST, MOST),
    ],
)
def test_each_number_of_a_tuple_has_limits(name, length, least, most, monkeypatch):
    monkeypatch.setattr(validation, "RELATIONS", ())
    monkeypatch.setattr(validation, "_check_dependent_fields", lambda config: None)
    free = {"schedule.warmup_epochs": 0.0}
    for limit, beyond in ((least, math.nextafter(least, -1)), (most, math.nextafter(most, math.inf))):
        validate(with_fields(Config(), free | {name: (limit,) * length}))
        with pytest.raises(ConfigError, match=rf"^{re.escape(name)}[.=]"):
            validate(with_fields(Config(), free | {name: (*(limit,) * (length - 1), beyond)}))


SWITCHES = {
    "scale_schedule": True,
    "augment.flip": True,
    "model.remat": False,
    "optimizer.nesterov": False,
    "reduce.overlap": True,
    "compile.deterministic": False,
    "logging.tensorboard": True,
    "logging.send_checkpoint": False,
}


def test_switches_are_as_documented_without_a_recipe():
    assert {name: value for name, value in flatten(dataclasses.asdict(Config())).items() if isinstance(value, bool)} == SWITCHES


@pytest.mark.parametrize(
    ("fields", "refused", "accepted"),
    [
        # of sections; refused and accepted: values of the first field
        ({"data.eval_resize": None, "data.eval_interpolation": "area", "data.source": "cifar10"}, (31, 321), (32, 320, 0.1, 1)),
        ({"data.eval_resize": None, "data.source": "cifar10"}, (7, 0.09, 1.01, 9.0), (8, 0.1, 1.0, 1)),
        ({"data.mean": ()}, ((0.5,), (0.5,) * 2, (0.5,) * 4), ((), (0.5,) * 3)),
        ({"data.std": ()}, ((0.5,) * 2, (0.5,) * 4), ((), (0.5,) * 3)),
        ({"augment.color_jitter": ()}, ((0.1,) * 5, (1.0, 1.0, 1.0, 0.51)), ((0.1,) * 4, (1.0, 1.0, 1.0, 0.5), (1.0,) * 3)),
        ({"model.blur_pool": "none", "model.stem": "small"}, ("convolutions_and_pool",), ("convolutions",)),
        ({"model.blur_pool": "none", "model.stem": "deep"}, (), ("convolutions_and_pool",)),
        ({"model.width": 64, "model.stem": "deep"}, (1, 63), (2, 64)),
        ({"model.width": 64, "model.stem": "small"}, (), (1, 63)),
        ({"optimizer.momentum_rule": "constant", "optimizer.name": "adamw"}, ("noise_scale",), ("constant",)),
        ({"optimizer.momentum_rule": "constant", "optimizer.name": "sgd"}, (), ("noise_scale", "as_printed")),
        ({"optimizer.average_start": "unbiased"}, ("initial", "warmup"), ("unbiased",)),
        ({"optimizer.average_start": "unbiased", "optimizer.average_decay": 0.9}, (), ("initial", "warmup")),
        ({"schedule.boundaries": (), "schedule.name": "goyal"}, ((9.0, 9.0), (9.0, 8.0)), ((9.0,), (8.0, 9.0))),
        ({"schedule.warmup_epochs": 5.0, "schedule.name": "goyal", "schedule.boundaries": (8.0, 9.0)}, (8.01,), (8.0, 0.0)),
        ({"logging.profile": None}, ("0,1", "1,0", "1", "01,1", "1,1,1", "1" * 13 + ",1"), ("1,1", "10,5", "1" * 12 + ",1")),
    ],
)
def test_fields_of_a_section_that_do_not_fit_are_refused_by_name(fields, refused, accepted):
    name = next(iter(fields))
    for value in accepted:
        assert flatten(dataclasses.asdict(validate(with_fields(Config(), fields | {name: value}))))[name] == value
    for value in refused:
        with pytest.raises(ConfigError, match=rf"^{name}="):
            validate(with_fields(Config(), fields | {name: value}))


@pytest.mark.parametrize(
    ("fields", "size", "side", "share", "is_set"),
    [
        ({}, 224, 224, 1.0, False),
        ({"augmentation": "random_resized_crop", "source": "folder"}, 224, 256, 0.875, False),
        ({"augmentation": "random_resized_crop"}, 224, 224, 1.0, False),  # of images in memory, on the device
        ({"stored_size": 320}, 224, 256, 0.875, False),
        ({"stored_size": 224}, 224, 224, 1.0, False),
        ({"eval_size": 288}, 288, 288, 1.0, True),
        ({"eval_resize": 232}, 224, 232, 224 / 232, True),
        ({"eval_resize": 0.95}, 224, 235, 0.95, True),  # timm: floor(224 / 0.95)
        ({"eval_resize": 1}, 224, 224, 1, True),
        ({"eval_interpolation": "area"}, 224, 224, 1.0, True),
        ({"eval_interpolation": "bilinear"}, 224, 224, 1.0, False),
    ],
)
def test_evaluation_resizes_as_the_fields_say(fields, size, side, share, is_set):
    data = Data(image_size=224, **fields)
    assert (data.evaluated_size, data.evaluation_side, data.evaluation_share) == (size, side, pytest.approx(share))
    assert type(data.evaluation_side) is int
    assert (data.sets_evaluation, data.eval_filter) == (is_set, fields.get("eval_interpolation", "bilinear"))


def test_names_of_a_network_and_other_properties_follow_from_the_fields():
    timm = {"imagenet strided": "ResNet-50", "deep strided": "ResNet-50-C", "deep pooled": "ResNet-50-D"}
    for form, title in (timm | {"imagenet pooled": "ResNet-50"}).items():
        stem, shortcut = form.split()
        assert Model(stem=stem, shortcut=shortcut).title == title
    assert Model(blur_pool="convolutions_and_pool").title == "ResNet-50 with BlurPool (convolutions and pool)"
    assert Model(name="mine", depth=18).title == "mine"
    assert [Model(batch_norm=form).resolved_batch_norm for form in ("auto", "separate", "folded")] == [
        *["separate"] * 2,
        "folded",
    ]
    assert Model(classes=2).class_count == 2
    with pytest.raises(ConfigError, match=r"^model\.classes=None: the number of classes is not known"):
        _ = Model().class_count
    assert (list(Logging(profile="10,3").profiled_steps), list(Logging().profiled_steps)) == ([10, 11, 12], [])
    assert Augment(color_jitter=(0.4, 0.0, 0.2, 0.1)).jitter_strengths == {"brightness": 0.4, "saturation": 0.2, "hue": 0.1}


def test_steps_are_skipped_by_the_guard_or_a_loss_scale_alone():
    for scale, guard, skips in (
        ("none", "stop", False),
        ("none", "skip", True),
        ("dynamic", "stop", True),
        (8.0, "stop", True),
    ):
        assert skips_steps(with_fields(Config(), {"optimizer.loss_scale": scale, "guard.non_finite": guard})) is skips


def test_image_size_of_a_phase_replaces_that_of_training():
    config = Config(data=Data(image_size=64), batch=(Phase(until_epoch=1.0, image_size=48), Phase()))
    assert [phase_image_size(config, index) for index in (0, 1)] == [48, 64]
    assert at_image_size(config, 64) is config
    assert at_image_size(config, 48) == dataclasses.replace(config, data=Data(image_size=48))
