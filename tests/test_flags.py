"""A command line that cannot be parsed: one line that names the flag and the nearest that there is."""

import contextlib
import functools
from pathlib import Path

import pytest

from jaxdp import load_config
from jaxdp.cli import main
from jaxdp.cli.bench import BENCHES
from jaxdp.config import Config
from jaxdp.recipes import apply_flags
from jaxdp.validation import to_json

COMMANDS = [[name] for name in main.COMMANDS] + [["bench", name] for name in BENCHES] + [["data", "prepare"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --model.dept 18", "--model.dept: unknown flag; did you mean --model.depth?"),
        ("train --lr 0.1", "--lr: unknown flag; did you mean --schedule.learning-rate 0.1?"),
        ("train --batch-size 8", "did you mean --batch.0.global-batch 8 (the global batch: that of all GPUs together;"),
        ("plan --depth 18", "--depth: unknown flag; did you mean --model.depth?"),
        ("train --batch.2.global-batch 3", "--batch.2.global-batch: the recipe has only 2 phases; add phases in a recipe file"),
        ("train --reduce.strategy tours", "reduce.strategy='tours': unknown name; did you mean torus? choose from "),
        ("train --batch.global-batch 32", "--batch.global-batch: unknown flag; did you mean --batch.0.global-batch "),
        ("train --solver.name sgd", "--solver.name: unknown flag; `jaxdp train --help all` lists all flags"),
        ("train digits", "'digits': unexpected argument; did you mean --config digits?"),
        ("train --schedule.epochs 3", "--schedule.epochs: unknown flag; did you mean --epochs?"),
        ("train --reduce psum", "--reduce: unknown flag; its fields are --reduce.strategy, --reduce.wire-dtype, "),
        ("train --data pets", "did you mean --data.directory pets --data.source folder (folder: images in SPLIT/CLASS/)?"),
        ("train --resume", "--resume: missing value; expected auto|never|PATH"),
        ("launch --processes 2 train.py", "'train.py': unexpected argument; put -- before the command"),
        ("train --model.depth 20", "--model.depth='20': invalid choice; choose from 18, 34, 50, 101, 152"),
        ("train --seed 1.5", "--seed='1.5': expected an integer"),
        ("train --config", "--config: missing value; expected: Recipe: a name in configs/, a .py file with config(), or "),
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
    main.main(arguments)
    assert capsys.readouterr().out == "jaxdp 0.1.0\n"
