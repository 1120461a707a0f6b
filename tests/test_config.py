import dataclasses
import json

import numpy as np
import pytest

from jaxdp.config import Adam, Config, Data, EveryOptimizer, Phase
from jaxdp.errors import ConfigError
from jaxdp.recipes import load_config, scale_schedule
from jaxdp.validation import TABLES, changes, from_dict, from_json, to_json, validate

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


def test_deterministic_with_strategy_auto_is_rejected():
    with pytest.raises(ConfigError, match=r"compile\.deterministic=True: not possible with reduce\.strategy='auto'"):
        load_config("digits", ["--compile.deterministic", "--reduce.strategy", "auto"])


def test_changes_lists_changed_fields_except_resume_safe_ones():
    other = dataclasses.replace(
        TWO_PHASES,
        seed=7,
        name="other",
        mesh=dataclasses.replace(TWO_PHASES.mesh, vertical=2),
        batch=(Phase(until_epoch=3.0), Phase(global_batch=256)),
    )
    assert changes(TWO_PHASES, other) == ["batch.1.global_batch: 512 -> 256", "seed: 0 -> 7"]


def test_changes_lists_the_epochs_without_the_schedule_that_they_scale():
    recipe = load_config("imagenet_sony_exp2")
    old, new = (scale_schedule(recipe, ["--epochs", epochs]) for epochs in ("0.3", "0.7"))
    old, new = dataclasses.replace(old, epochs=0.3), dataclasses.replace(new, epochs=0.1 * 7)
    assert changes(old, new) == ["epochs: 0.3 -> 0.7, which scales the schedule"]
    assert changes(old, dataclasses.replace(old, epochs=0.7)) == ["epochs: 0.3 -> 0.7"]
    schedule = dataclasses.replace(new.schedule, warmup_epochs=0.123456)
    listed = changes(old, dataclasses.replace(new, schedule=schedule))
    assert "schedule.warmup_epochs: " + f"{old.schedule.warmup_epochs:.4g} -> 0.1235" in listed
    assert changes(Config(epochs=1.0), Config(epochs=1.000001)) == ["epochs: 1.0 -> 1.000001"]


ANOTHER = {"adapt": "all", "class_weights": "balanced", "target_threshold": 0.2, "magnitude": 5.0, "boundaries": (1.0, 2.0)}
ANOTHER |= {"train_split": "fit", "eval_split": "validation", "image_column": "photo", "label_column": "breed"}
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
