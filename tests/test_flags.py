"""A command line that cannot be parsed: one line that names the flag and the nearest that there is."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Literal

import pytest

from jaxdp import load_config
from jaxdp.cli import main
from jaxdp.cli.bench import BENCHES
from jaxdp.config import Config
from jaxdp.errors import ConfigError
from jaxdp.flags import Arg, flag_value, parse
from jaxdp.recipes import apply_flags
from jaxdp.validation import to_json

COMMANDS = [[name] for name in main.COMMANDS] + [["bench", name] for name in BENCHES] + [["data", "prepare"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --model.dept 18", "--model.dept: unknown flag; did you mean --model.depth?"),
        ("train --lr 0.1", "--lr: unknown flag; did you mean --schedule.learning-rate 0.1?"),
        ("train --batch-size 8", "did you mean --batch.0.global-batch 8 (the batch of all GPUs together;"),
        ("plan --depth 18", "--depth: unknown flag; did you mean --model.depth?"),
        ("train --batch.2.global-batch 3", "--batch.2.global-batch: the recipe has only 2 phases; add phases in a recipe file"),
        ("train --reduce.strategy tours", "reduce.strategy='tours': unknown name; did you mean torus? choose from "),
        ("train --batch.global-batch 32", "--batch.global-batch: unknown flag; did you mean --batch."),
        ("train --strange sgd", "--strange: unknown flag; `jaxdp train --help all` lists all flags"),
        ("train digits", "'digits': unexpected argument; did you mean --config digits?"),
        ("train mine.py", "'mine.py': unexpected argument; did you mean --config mine.py?"),
        ("train jaxdp", "'jaxdp': unexpected argument; did you mean --data.source folder --data.directory jaxdp?"),
        ("train nothing", "'nothing': unexpected argument; `jaxdp train --help all` lists all flags"),
        ("bench step digits", "'digits': unexpected argument; did you mean --config digits?"),
        ("evaluate digits", "'digits': unexpected argument; did you mean --workdir digits?"),
        ("train --schedule.epochs 3", "--schedule.epochs: unknown flag; did you mean --epochs?"),
        ("train --reduce psum", "--reduce: unknown flag; did you mean --reduce."),
        ("train --data pets", "did you mean --data.directory pets --data.source folder (folder: images in SPLIT/CLASS/)?"),
        ("train --resume", "--resume: missing value; expected auto|never|PATH"),
        ("launch --processes 2 train.py", "'train.py': unexpected argument; put -- before the command"),
        ("train --model.depth 20", "--model.depth='20': invalid choice; choose from 18, 34, 50, 101, 152"),
        ("train --seed 1.5", "--seed='1.5': expected an integer"),
        ("train --config", "--config: missing value; expected: Recipe: a name in configs/, a .py file with config(), or "),
        ("train --data.directory", "--data.directory: missing value; expected: Directory of the image folder"),
        ("plan --json=yes", "--json='yes': takes no value"),
        ("export --workdir a", "--output: required; for example --output digits.safetensors, or --card README.md"),
        ("plan --epochs many --help", "--epochs='many': expected a number"),
        ("bench scalng", "invalid choice; did you mean scaling? choose from allreduce, input, lr, scaling, step"),
    ],
)
def test_invalid_command_line_is_one_line_with_a_hint(failing, arguments, message):
    assert message in failing(*arguments.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("evaluate", "--workdir: required; {give}"),
        ("predict runs/b a.jpg", "'runs/b': is a run; give it with --workdir runs/b"),
        ("report --workdir runs/b", "--workdir: unknown flag; give it as an argument: jaxdp report runs/b"),
    ],
)
def test_missing_or_misplaced_run_is_named_with_its_flag(failing, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.json").write_text(to_json(Config()))
    give = "give the directory of a run; ./runs holds runs/a, runs/b"
    assert failing(*arguments.split()) == message.format(give=give)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--optimizer.class-weights balanced", "balanced"),
        ("--optimizer.class-weights 1 2.5", (1.0, 2.5)),
        ("--optimizer.class-weights 1", (1.0,)),
        ("--schedule.boundaries", ()),
        ("--optimizer.average-decay None", None),
        ("--schedule.end -1", -1.0),
        ("--checkpoint.keep=32", 32),
        ("--model.depth=18", 18),
        ("--data.directory=", ""),
        ("--name None", "None"),
        ("--augment.no-flip", False),
        ("--augment.no-flip --augment.flip", True),
        ("--batch.1.global_batch 64 --batch.1.global-batch 32", 32),
    ],
)
def test_value_of_a_flag_has_the_type_of_its_field_and_the_last_one_counts(words, value):
    flags = words.split()
    path = flags[0].partition("=")[0].removeprefix("--").replace("-", "_").replace("no_", "")
    config = apply_flags(load_config("digits"), flags)
    found = functools.reduce(
        lambda part, name: part[int(name)] if name.isdigit() else getattr(part, name), path.split("."), config
    )
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command_has_examples(capsys, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):
        main.main([*command, "--help"])
    out, err = capsys.readouterr()
    assert (err, "\x1b" in out) == ("", False)
    assert f"jaxdp {' '.join(command)}" in out.partition("Example")[2].partition("ptions:")[0]


@pytest.mark.parametrize("arguments", [["--version"], ["train", "--version"]])
def test_version_flag_prints_the_version(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert (ended.value.code, capsys.readouterr().out) == (None, "jaxdp 0.1.0\n")


@dataclasses.dataclass
class Made:
    """Options of a program.

    Examples:
    made a 1 --level 3 --of x
    """

    name: Annotated[str, Arg(positional=True)]
    numbers: Annotated[tuple[int, ...], Arg(positional=True)]
    level: Literal[1, "auto"] | float | None = None
    """Level of it; more on it."""
    on: Annotated[bool, Arg(negatable=False)] = False
    off: bool = True
    sizes: tuple[int, ...] | Literal["all"] = (1, 2)
    of: str = dataclasses.field(kw_only=True)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("a --of x", {}),
        ("a 1 2 --of=x", {"numbers": (1, 2)}),
        ("a --on --no-off --of x 3 4", {"on": True, "off": False, "numbers": (3, 4)}),
        ("a --of x --level 1", {"level": 1}),
        ("a --of x --level -1", {"level": -1.0}),
        ("a --of x --level -.5", {"level": -0.5}),
        ("a --of x --level auto --level None", {"level": None}),
        ("a --of x --level auto", {"level": "auto"}),
        ("a --of x --sizes all", {"sizes": "all"}),
        ("a --of x --sizes 3", {"sizes": (3,)}),
        ("a --of x --sizes", {"sizes": ()}),
        ("a --of x --sizes 3 --no-off --no-off --off", {"sizes": (3,), "off": True}),
    ],
)
def test_options_have_the_values_of_their_words_and_defaults_otherwise(words, fields):
    made = parse(Made, words.split(), "made")
    expected = Made(**{"name": "a", "numbers": (), "of": "x"} | fields)
    assert (made, type(made.level)) == (expected, type(expected.level))
    again = parse(Made, ["--level", "2"], "made", default=made)  # what was required is given
    assert again == dataclasses.replace(made, level=2.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--of x", "NAME: required; see `made --help`"),
        ("a", "--of: required; for example --of x"),
        ("a b --of x", "NUMBERS='b': expected an integer\n"),
        ("a --of x --level high", "--level='high': expected 1, auto or a number or None"),
        ("a --of x --level", "--level: missing value; expected 1, auto or a number or None"),
        ("a --of", "--of: missing value; expected: "),
        ("a --of x --no-on", "--no-on: unknown flag; "),
        ("a --of x --on=1", "--on='1': takes no value"),
        (
            "a --of x --levle 2 --offf",
            "--levle: unknown flag; did you mean --level?; --offf: unknown flag; did you mean --off?",
        ),
        ("a --of x --name b", "--name: unknown flag; give it as an argument: made b"),
        ("a --of x --strange", "--strange: unknown flag; `made --help` lists all flags"),
        ("a --of s3://bucket/x", "--of='s3://bucket/x': "),
    ],
)
def test_word_that_cannot_be_parsed_is_named(words, message):
    with pytest.raises(ConfigError) as error:
        parse(Made, words.split(), "made")
    assert f"{error.value}\n".startswith(message)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--config a --config b", "b"),
        ("--config=a", "a"),
        ("--config a --seed 1", "a"),
        ("--config --seed 1", None),
        ("--config", None),
        ("--seed 1", None),
        ("--configs a", None),
        ("--config= ", ""),
        ("--config -1", "-1"),
    ],
)
def test_flag_on_a_line_that_is_not_parsed_has_the_last_value(words, value):
    assert flag_value(words.split(), "--config") == value
    assert flag_value(["--a_b", "1"], "--a-b") == flag_value(["--a-b", "1"], "--a_b") == "1"
