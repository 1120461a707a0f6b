"""Loading of recipes by name or file, with flags applied."""

import sys
from pathlib import Path

import pytest

import jaxdp
from jaxdp.config import Config, Optimizer, Phase, Schedule
from jaxdp.errors import ConfigError
from jaxdp.files import known_recipes
from jaxdp.recipes import (
    adapt,
    find_config,
    is_rank0,
    load_config,
    load_recipe,
    register_from,
    reset_for_network,
    scale_schedule,
)
from jaxdp.validation import to_json, with_fields

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "must be a JSON object"), ("{", "invalid JSON"), ("7", "must be a JSON object")]
)
def test_load_config_of_an_invalid_json_file_names_it(tmp_path, text, message):
    saved = tmp_path / "mine.json"
    saved.write_text(text)
    with pytest.raises(ConfigError, match=f"^--config='{saved}': config.*: {message}"):
        load_config(saved)


def test_load_config_of_a_saved_config_whose_optimizer_is_not_registered_raises(tmp_path):
    (saved := tmp_path / "mine.json").write_text(to_json(with_fields(Config(), {"optimizer.name": "mine"})))
    with pytest.raises(ConfigError, match=f"^--config='{saved}': optimizer.name='mine': unknown name; "):
        load_config(saved)


def test_load_config_with_numbers_in_the_flags_is_that_with_their_text():
    assert load_config("digits", ["--epochs", 3]) == load_config("digits", ["--epochs", "3"])


def test_load_config_by_name_and_by_path_are_equal(tmp_path, monkeypatch):
    by_name = load_config("digits")
    assert by_name == load_config(find_config("digits")) == load_config(Path("digits"))
    saved = tmp_path / "config.json"
    saved.write_text(to_json(by_name))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(saved) == load_config("~/config.json") == by_name


def test_load_config_with_flags_overrides_the_recipe():
    config = load_config("digits", ["--seed", "3", "--batch.0.global-batch", "64", "--optimizer.nesterov"])
    assert (config.seed, config.batch[0].global_batch, config.optimizer.nesterov) == (3, 64, True)
    assert config.batch[1] == load_config("digits").batch[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def config(): return 3", "must be a jaxdp.Config"),
        (
            "class Mine:\n    def __init__(self): pass\ndef config(): return Mine(a=1)",
            r"\(line 3\): TypeError: Mine.__init__\(\) got an unexpected keyword argument 'a'$",
        ),
        ("config = 3", r"a recipe must define config\(\) -> jaxdp.Config"),
        ("", r"a recipe must define config\(\) -> jaxdp.Config"),
        ("def config(): return Nothing()", "NameError"),
        (
            "from jaxdp.config import *\ndef config():\n    return Config(\n        model=Model(deph=18))",
            r"\(line 4\): TypeError: .*'deph'; did you mean depth\? choose from",
        ),
    ],
)
def test_load_config_of_a_failing_recipe_names_line_and_error(tmp_path, text, message):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(recipe)


def test_recipe_that_prints_and_defines_dataclasses_loads_and_keeps_stdout_clean(tmp_path, capsys):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from __future__ import annotations\nimport dataclasses\nfrom jaxdp import Config\nprint('hello')\n"
        "@dataclasses.dataclass\nclass Mine:\n    seed: int = 3\n"
        "def config():\n    return Config(seed=Mine().seed, model=dataclasses.replace(Config().model, classes=10))\n"
    )
    assert load_config(recipe).seed == 3
    assert capsys.readouterr() == ("", "hello\n")  # stdout is kept for results


@pytest.mark.parametrize("flags", [["--optimizer.name", "sgd"], ["--optimizer.name=lars", "--optimizer.name=sgd"]])
def test_flag_for_another_choice_resets_fields_that_only_the_recipes_choice_uses(flags, tmp_path):
    recipe = tmp_path / "mine.py"
    fields = "trust_coefficient=0.01, eps=1e-9, adapt='all', weight_decay=0.5"
    lines = "from jaxdp.config import Config, Optimizer", "def config():", f"    return Config(optimizer=Optimizer({fields}))"
    recipe.write_text("\n".join(lines))
    assert load_config(recipe, flags).optimizer == Optimizer(name="sgd", weight_decay=0.5)
    assert load_recipe(["--config", str(recipe), *flags], "digits").config.optimizer.trust_coefficient == 0.001
    assert load_config(recipe, ["--optimizer.name", "lars"]).optimizer.eps == 1e-9
    with pytest.raises(ConfigError, match=r"^optimizer.trust_coefficient=0.02: not used with optimizer.name='sgd'"):
        load_config(recipe, [*flags, "--optimizer.trust-coefficient", "0.02"])


@pytest.mark.parametrize("source", [["synthetic"], ["folder", "--data.directory", "D"]])
@pytest.mark.parametrize("name", sorted(known_recipes()))
def test_every_recipe_can_be_rehearsed_on_other_images(name, source):
    assert load_config(name, ["--data.source", *source]).data.source == source[0]


def test_source_by_flag_resets_what_it_cannot_use_with_a_note(capsys):
    config = load_config("imagenet_rsb_a1", ["--data.source", "synthetic"])
    assert (config.augment.crop_interpolation, config.data.eval_resize) == ("unfiltered", None)
    note = (
        "the recipe's augment.crop_interpolation is reset: images of synthetic are cropped on the device, not while decoding\n"
    )
    assert capsys.readouterr().err == note
    with pytest.raises(ConfigError, match=r"^augment.crop_interpolation='bicubic': images of synthetic are cropped on the"):
        load_config("imagenet_rsb_a1", ["--data.source", "synthetic", "--augment.crop-interpolation", "bicubic"])


@pytest.mark.parametrize(("augmentation", "stored"), [("random_resized_crop", None), ("none", None), ("paper", 320)])
def test_augmentation_by_flag_resets_a_stored_size_that_it_cannot_use(augmentation, stored):
    assert load_config("imagenet_lars_32k", ["--data.augmentation", augmentation]).data.stored_size == stored


@pytest.mark.parametrize(
    ("name", "flag", "expected"),
    [("imagenet_rsb_a1", "256", 256), ("imagenet_torchvision_v2", "0.9", 0.9), ("imagenet_torchvision_v2", "1", 1)],
)
def test_flag_gives_the_evaluation_resize_in_pixels_or_as_a_crop_ratio(name, flag, expected):
    assert load_config(name, ["--data.eval-resize", flag]).data.eval_resize == expected


@pytest.mark.parametrize("value", ["1.5", "0.05", "7", "256.0", "65537", "nan"])
def test_evaluation_resize_that_is_neither_pixels_nor_a_ratio_is_refused(value):
    with pytest.raises(ConfigError, match=r"^data.eval_resize=.*: must be a crop ratio from 0.1 to 1, or a whole number of"):
        load_config("imagenet_rsb_a1", ["--data.eval-resize", value])


def test_load_config_with_other_epochs_scales_the_schedule_and_prints_one_line(capsys):
    recipe, config = load_config("digits"), load_config("digits", ["--epochs", "14"])
    assert config.batch[0].until_epoch == 2 * recipe.batch[0].until_epoch
    assert config.schedule.warmup_epochs == 2 * recipe.schedule.warmup_epochs
    assert capsys.readouterr().err == (
        "the recipe's schedule is scaled from 7 epochs to 14: phases, warm-up (--no-scale-schedule keeps it)\n"
    )
    goyal = load_config("imagenet_goyal_256", ["--epochs", "9"])
    assert goyal.schedule.boundaries == pytest.approx((3, 6, 8))


def test_only_train_and_plan_print_the_notes_of_a_recipe_file_that_calls_load_config(capsys, tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("import jaxdp\n\ndef config():\n    return jaxdp.load_config('digits', ['--epochs', '14'])\n")
    register_from(None)
    with pytest.raises(ConfigError, match="file not found"):
        register_from("absent.py")
    register_from(str(recipe))
    load_recipe(["--config", str(recipe)], "digits")
    load_recipe(["--config", str(recipe), "--rank", "1"], "digits", notes=True)
    assert capsys.readouterr().err == ""
    for rank in ([], ["--rank", "0"]):
        load_recipe(["--config", str(recipe), *rank], "digits", notes=True)
        assert capsys.readouterr().err.startswith("the recipe's schedule is scaled")


def test_recipe_chosen_by_omission_warns_of_own_images():
    folder = ["--data.source", "folder", "--data.directory", "D"]
    assert "--config pictures is for your own" in load_recipe([*folder, "--epochs", "3"], "digits").note
    for flags in ([*folder, "--config", "digits"], ["--data.source", "synthetic"], []):
        assert load_recipe(flags, "digits").note == ""


@pytest.mark.parametrize("flags", [["--no-scale-schedule"], ["--epochs=7"], []])
def test_load_config_keeps_the_schedule(capsys, flags):
    config = load_config("digits", [*(["--epochs", "9"] if "--no-scale-schedule" in flags else []), *flags])
    recipe = load_config("digits")
    assert (config.batch, config.schedule) == (recipe.batch, recipe.schedule)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--optimizer.name", "sgd"], True),
        (["--optimizer.name", "lars"], False),
        (["--optimizer.name", "sgd", "--schedule.learning-rate", "0.05"], False),
        (["--optimizer.momentum", "0.8"], False),
    ],
)
def test_another_optimizer_with_the_recipes_learning_rate_is_noted(capsys, flags, warned):
    load_config("digits", flags)
    note = "the recipe's learning rate 0.4 is for lars; for sgd set --schedule.learning-rate (`jaxdp bench lr` suggests one)\n"
    assert capsys.readouterr().err == (note if warned else "")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_notes_are_printed_by_rank_0_alone(rank, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    load_config("digits", ["--epochs", "3"])
    assert ("the recipe's schedule is scaled" in capsys.readouterr().err) == (rank == "0")


def test_recipe_file_gives_its_callbacks_to_the_command_line_and_names_its_error(tmp_path):
    recipe = tmp_path / "mine.py"
    text = "import jaxdp\ndef config():\n    return jaxdp.load_config('digits')\ndef callbacks():\n"
    recipe.write_text(text + "    print('quietly')\n    return [jaxdp.Callback()]\n")
    (callback,) = load_recipe(["--config", str(recipe)], "digits").callbacks()
    assert isinstance(callback, jaxdp.Callback)
    recipe.write_text(text + "    return 1 / 0\n")
    with pytest.raises(ConfigError, match=r"mine\.py': failed \(line 5\): ZeroDivisionError: "):
        load_recipe(["--config", str(recipe)], "digits").callbacks()
    assert list(load_recipe([], "digits").callbacks()) == []


@pytest.mark.parametrize(
    ("flags", "phases", "warmup", "boundaries", "scaled"),
    [
        (["--epochs", "18"], (9.0, None), 1.0, (6.0, 12.0, 16.0), "phases, warm-up, learning-rate steps"),
        (["--epochs=18", "--schedule.warmup-epochs", "2"], (9.0, None), 2.0, (6.0, 12.0, 16.0), "phases, learning-rate steps"),
        (["--epochs", "18", "--batch.0.until-epoch", "7"], (7.0, None), 1.0, (6.0, 12.0, 16.0), "warm-up, learning-rate steps"),
        (["--epochs", "18", "--schedule.boundaries", "8", "9"], (9.0, None), 1.0, (8.0, 9.0), "phases, warm-up"),
        (["--epochs", "90"], (45.0, None), 5.0, (30.0, 60.0, 80.0), None),
        (["--epochs", "100", "--no-scale-schedule"], (45.0, None), 5.0, (30.0, 60.0, 80.0), None),
    ],
)
@pytest.mark.parametrize("by_recipe", [True, False])
def test_flag_scales_exactly_what_no_other_flag_gives(tmp_path, capsys, flags, phases, warmup, boundaries, scaled, by_recipe):
    """by_recipe: whether the recipe scales; one that does not is asked to by a flag."""
    schedule = Schedule("goyal", warmup_epochs=5.0, boundaries=(30.0, 60.0, 80.0))
    recipe = Config(batch=(Phase(until_epoch=45.0), Phase()), schedule=schedule, scale_schedule=by_recipe)
    (tmp_path / "mine.json").write_text(to_json(recipe))
    asked = [] if by_recipe or "--no-scale-schedule" in flags else ["--scale-schedule"]
    config = load_config(tmp_path / "mine.json", [*flags, *asked])
    assert tuple(phase.until_epoch for phase in config.batch) == pytest.approx(phases)
    assert config.schedule.warmup_epochs == pytest.approx(warmup)
    assert config.schedule.boundaries == pytest.approx(boundaries)
    note = f"the recipe's schedule is scaled from 90 epochs to 18: {scaled} (--no-scale-schedule keeps it)\n"
    assert capsys.readouterr().err == (note if scaled else "")
    if not by_recipe and scaled and len(flags) == 2:
        with pytest.raises(ConfigError, match="must end before the run"):
            load_config(tmp_path / "mine.json", flags)


@pytest.mark.parametrize("epochs", ["0", "-3.5", "nan", "inf", "many"])
def test_schedule_is_not_scaled_by_a_number_of_epochs_that_the_parser_refuses(epochs):
    config = load_config("digits")
    assert scale_schedule(config, ["--epochs", epochs]) is config


@pytest.mark.parametrize(
    ("flags", "classes"),
    [
        (["--data.source", "synthetic"], None),  # 10 are the classes of digits
        (["--data.source", "digits"], 10),
        (["--data.augmentation", "none"], 10),
    ],
)
def test_another_source_resets_the_number_of_classes_unless_the_network_exists(flags, classes):
    config = with_fields(load_config("digits"), {"model.classes": 10})
    assert adapt(config, flags).config.model.classes == classes
    assert reset_for_network(config, flags) == with_fields(adapt(config, flags).config, {"model.classes": 10})
    seven = with_fields(Config(), {"data.source": "synthetic", "model.classes": 7})
    assert adapt(seven, ["--data.source", "folder"]).config.model.classes == 7  # not the source's number


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        ({"RANK": "1"}, True),  # of no launcher that is known
        ({"WORLD_SIZE": "2", "RANK": "0"}, True),
        ({"WORLD_SIZE": "2", "RANK": "1"}, False),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, False),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_INDEX": "1"}, False),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "3"}, True),
    ],
)
def test_first_process_is_that_of_its_launcher(variables, is_first):
    assert is_rank0(variables) is is_first


def test_recipe_file_may_import_a_file_beside_it_wherever_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "beside_the_recipe.py").write_text("SEED = 5\n")
    (tmp_path / "mine.py").write_text(
        "import beside_the_recipe, jaxdp\ndef config():\n    return jaxdp.Config(seed=beside_the_recipe.SEED)\n"
    )
    before = [*sys.path]
    monkeypatch.chdir(tmp_path)
    assert load_config("mine.py").seed == 5
    assert sys.path == before
    monkeypatch.delitem(sys.modules, "beside_the_recipe")


def test_recipe_file_is_forgotten_after_it_is_read_and_leaves_no_bytecode(tmp_path, monkeypatch):
    for writes in (True, False):
        monkeypatch.setattr(sys, "dont_write_bytecode", writes)
        (tmp_path / "mine.py").write_text("import jaxdp\ndef config():\n    return jaxdp.Config()\n")
        load_config(tmp_path / "mine.py")
        assert sys.dont_write_bytecode is writes
        assert "jaxdp_recipe_mine" not in sys.modules
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py", r"^--config='absent.py': file not found$"),
        ("absent.json", r"^--config='absent.json': file not found$"),
        (
            "digit",
            r"^--config='digit': unknown recipe; did you mean digits\? choose from .*, digits, .*, or use the path of a .py",
        ),
        ("s3://bucket/mine.py", "^--config='s3://bucket/mine.py': "),
    ],
)
def test_recipe_that_does_not_exist_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError, match=message):
        load_config(name)
    with pytest.raises(ConfigError, match=r"^overrides='--seed 3': must be a list of flags; give \['--seed', '3'\]$"):
        load_config("digits", "--seed 3")


def test_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "mine.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(tmp_path / "mine.json")
