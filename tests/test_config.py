import dataclasses
import json
from typing import get_args, get_type_hints

import pytest

from jaxdp.config import Augment, Config, ConfigError, Model, Phase, Schedule
from jaxdp.recipes import find_config, load_config
from jaxdp.validation import USED_ONLY_WITH, changes, from_json, to_json, validate

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


def test_json_round_trip_gives_the_same_config():
    assert from_json(to_json(TWO_PHASES)) == TWO_PHASES


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("epochs", "3", "epochs: '3' is not allowed; input should be a valid number"),
        ("epochs", float("nan"), "epochs: nan is not allowed"),
        ("epochs", -1, "epochs: -1 is not allowed; input should be greater than 0"),
        ("seed", True, "seed: True is not allowed"),
        ("model.classes", 0, "model.classes: 0 is not allowed; input should be greater than or equal to 2"),
        ("model.clases", 3, "model.clases: unknown field; did you mean classes?"),
        ("model.depth", 20, "model.depth: 20 is not allowed; input should be 18, 34, 50, 101 or 152"),
        ("qqqq", 3, "qqqq: unknown field; known are name, seed, epochs"),
        ("batch.0.global_batch", 0, "batch.0.global_batch: 0 is not allowed"),
        ("batch.1.globalbatch", 1, "batch.1.globalbatch: unknown field; did you mean global_batch?"),
        ("batch.0.until_epoch", None, "batch.0.until_epoch: None is not allowed; only the last phase may leave it out"),
        (
            "batch.1.until_epoch",
            2.0,
            "batch.1.until_epoch: 2 is not allowed; phases go forward, so it must be above batch.0.until_epoch (3)",
        ),
        ("batch.1.until_epoch", 80.0, "batch.1.until_epoch: 80 is not allowed; the last phase ends with the run"),
        ("batch.1.per_worker_batch", 7, "batch.1.per_worker_batch: 7 is not allowed; it must divide the global batch 512"),
        ("optimizer.momentum", 1.0, "optimizer.momentum: 1.0 is not allowed; input should be less than 1"),
        ("schedule.warmup_epochs", 90.0, "schedule.warmup_epochs: 90 is not allowed; it must be below epochs"),
        ("schedule.boundaries", [3.0, 2.0], "schedule.boundaries: (3.0, 2.0) is not allowed with schedule.name"),
        ("data.train_split", "all", "data.train_split: 'all' is not allowed; the digits have train and fit"),
        ("data.eval_split", "validation", "data.eval_split: 'validation' is not allowed; it is part of the training"),
        ("model", Model(classes=3).__dict__, "model.classes: 3 is not allowed; digits needs at least 10"),
        ("name", "../x", "name: '../x' is not allowed"),
        ("batch", [], "batch: () is not allowed; give at least one phase"),
    ],
)
def test_a_wrong_value_is_one_line_with_field_value_and_what_is_allowed(path, value, message):
    with pytest.raises(ConfigError) as caught:
        from_json(with_value(path, value))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_validate_checks_types_of_a_config_built_in_python():
    with pytest.raises(ConfigError, match="epochs: 'many' is not allowed"):
        validate(Config(epochs="many"))
    with pytest.raises(ConfigError, match=r"give a jaxdp\.Config"):
        validate({"epochs": 3})


def test_bits_that_are_to_be_the_same_do_not_hang_on_a_measurement():
    with pytest.raises(ConfigError, match=r"compile\.deterministic: True is not allowed with reduce\.strategy 'auto'"):
        load_config("digits", ["--compile.deterministic", "--reduce.strategy", "auto"])


def test_text_that_is_no_json_is_said_to_be_none():
    with pytest.raises(ConfigError, match="not valid JSON"):
        from_json("{")


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "object with fields"), ("{", "not valid JSON"), ("7", "object with fields")]
)
def test_a_saved_recipe_that_cannot_be_read_is_named(tmp_path, text, message):
    saved = tmp_path / "mine.json"
    saved.write_text(text)
    with pytest.raises(ConfigError, match=f"^--config: '{saved}' is not allowed; the configuration is .*{message}"):
        load_config(saved)


def test_a_recipe_is_found_by_name_and_by_path(tmp_path):
    by_name = load_config("digits")
    assert by_name == load_config(find_config("digits"))
    saved = tmp_path / "config.json"
    saved.write_text(to_json(by_name))
    assert load_config(saved) == by_name


def test_flags_are_laid_over_a_recipe():
    config = load_config("digits", ["--seed", "3", "--batch.0.global-batch", "64", "--optimizer.nesterov"])
    assert (config.seed, config.batch[0].global_batch, config.optimizer.nesterov) == (3, 64, True)
    assert config.batch[1] == load_config("digits").batch[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit", "no such recipe; did you mean digits"),
        ("/nowhere/x.py", "there is no such file"),
        ("x.json", "there is no such file"),
    ],
)
def test_a_missing_recipe_is_an_error_that_names_it(name, message):
    with pytest.raises(ConfigError, match=message):
        load_config(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "a recipe defines config"),
        ("def config(): return 3", "give a jaxdp.Config"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("def config(): return Nothing()", "NameError"),
        ("import sys; sys.exit(0)", r"it does not run \(line 1\): SystemExit: 0"),
        ("raise ValueError('one\\ntwo')", r"it does not run \(line 1\): ValueError: one$"),
        (
            "import jaxdp\ndef config():\n    return jaxdp.Config(epoch=1)",
            r"it does not run \(line 3\): TypeError: .*'epoch'; did you mean epochs\?$",
        ),
        (
            "from jaxdp.config import *\ndef config():\n    return Config(\n        model=Model(deph=18))",
            r"\(line 4\): TypeError: .*'deph'; did you mean depth\?$",
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_said_to_be_none(tmp_path, text, message):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(recipe)


def test_a_recipe_may_print_and_define_dataclasses(tmp_path, capsys):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from __future__ import annotations\nimport dataclasses\nfrom jaxdp import Config\nprint('hello')\n"
        "@dataclasses.dataclass\nclass Mine:\n    seed: int = 3\n"
        "def config():\n    return Config(seed=Mine().seed, model=dataclasses.replace(Config().model, classes=10))\n"
    )
    assert load_config(recipe).seed == 3
    assert capsys.readouterr() == ("", "hello\n")  # stdout is kept for results


def test_a_config_that_is_no_text_is_said_to_be_none(tmp_path):
    saved = tmp_path / "config.json"
    saved.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not allowed; it is no text in UTF-8"):
        load_config(saved)


def test_changes_name_fields_and_leave_out_what_does_not_change_the_run():
    other = dataclasses.replace(
        TWO_PHASES,
        seed=7,
        name="other",
        mesh=dataclasses.replace(TWO_PHASES.mesh, vertical=2),
        batch=(Phase(until_epoch=3.0), Phase(global_batch=256)),
    )
    assert changes(TWO_PHASES, other) == ["batch.1.global_batch: 512 -> 256", "seed: 0 -> 7"]


ANOTHER = {
    "aspect": 1.5,
    "boundaries": (1.0, 2.0),
    "contrast": 1.5,
    "denominator": "norm_of_sum",
    "eval_split": "validation",
    "padding": 2,
    "train_split": "fit",
}


def another_value(name, default):
    if isinstance(default, bool):
        return not default
    return ANOTHER.get(name) or (default / 2 or 0.25 if isinstance(default, float) else default + 1)


def refusal(tree) -> str:
    try:
        from_json(json.dumps(tree))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("chooser", "allowed", "part", "names"), USED_ONLY_WITH)
def test_a_field_that_would_be_ignored_is_refused_where_it_is_and_nowhere_else(chooser, allowed, part, names):
    section, field = chooser.split(".")
    choices = get_args(get_type_hints(type(getattr(Config(), section)))[field]) or ("digits", "synthetic", "cifar10")
    assert set(allowed) < set(choices)
    for name in names.split():
        for choice in choices:
            tree = dataclasses.asdict(Config())
            tree[part][name] = another_value(name, tree[part][name])
            tree[section][field] = choice
            told = f"is not allowed with {chooser} {choice!r}, which does not use it" in refusal(tree)
            assert told == (choice not in allowed), (name, choice)


def test_the_flag_that_undoes_an_ignored_value_is_shown():
    config = Config(schedule=Schedule(boundaries=(1.0,), factor=0.5))
    with pytest.raises(ConfigError, match=r"the default: --schedule.boundaries --schedule.factor 0.1$"):
        validate(config)
    config = Config(augment=Augment(flip=False))
    with pytest.raises(ConfigError, match=r"the default: --augment.flip$"):
        validate(config)


def test_boundaries_must_increase():
    with pytest.raises(ConfigError, match=r"schedule.boundaries: \(3.0, 2.0\) is not allowed; it must increase"):
        validate(Config(schedule=Schedule(name="goyal", boundaries=(3.0, 2.0))))
